"""Trains the generator of the attack `generative_prior` on public images.

The images are the test split of a data source, of which no client ever holds one; the file records
which, and the attack has to declare the same (`public`). Prints what to write in a scenario.

    python benchmarks/train_generator.py photos photos-generator.safetensors
        [--set size=32 ...] [--width 32] [--iterations 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.contracts.plugins import load
from fedsim.recording.files import write_bytes
from fedsim.scenario import parameters_of
from fedsim_attacks.gradient_matching.generative_prior import fit_generator, pack_generator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="see fedsim list data")
    parser.add_argument("out", type=Path, help="the safetensors file to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--width", type=int, default=32, help="channels")
    parser.add_argument("--iterations", type=int, default=2000, help="batches of 16 images")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.width % 8 or not 16 <= arguments.width <= 1024:
        parser.error("--width: give a multiple of 8 from 16 to 1024")
    parameters = parameters_of("fedsim.data", arguments.source, arguments.set)
    source = load("fedsim.data", arguments.source).model_validate(parameters)
    assert isinstance(source, DataSource)
    images = source.load().test_images.float() / 255

    def report(iteration: int, loss: Tensor) -> None:
        if iteration % 100 == 0 or iteration == arguments.iterations:
            print(f"{iteration}/{arguments.iterations}: mse {loss:.5f}", file=sys.stderr)

    generator = fit_generator(
        images,
        width=arguments.width,
        iterations=arguments.iterations,
        seed=arguments.seed,
        report=report,
    )
    public = " ".join([arguments.source, *arguments.set, f"test split, {len(images)} images"])
    write_bytes(arguments.out, pack_generator(generator, public))
    attack = {"name": "generative_prior", "weights": str(arguments.out), "public": public}
    print(json.dumps(attack))


if __name__ == "__main__":
    main()
