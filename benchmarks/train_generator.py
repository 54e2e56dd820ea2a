"""Trains the generator of the attack `generative_prior` on public images.

A code for each image is learned with the weights (Bojanowski, Joulin, Lopez-Paz and Szlam,
Optimizing the Latent Space of Generative Networks, ICML 2018, with the squared error): no
adversary, hence stable on few images too. The images are the test split of a data source, of which
no client ever holds one; the file records which, and the attack has to declare the same (`public`).
Prints what to write in a scenario.

    python benchmarks/train_generator.py photos photos-generator.safetensors
        [--set size=32 ...] [--width 32] [--iterations 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim import rng as streams
from fedsim.contracts.data import DataSource
from fedsim.contracts.plugins import load
from fedsim.recording.files import write_bytes
from fedsim.scenario import parameters_of
from fedsim_attacks.gradient_matching.generative_prior import LATENT, Generator, pack_generator

_CODE_RATE = 1e-2
_WEIGHT_RATE = 1e-3
_BATCH = 16


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

    def told(iteration: int, loss: Tensor) -> None:
        if iteration % 100 == 0 or iteration == arguments.iterations:
            print(f"{iteration}/{arguments.iterations}: mse {loss:.5f}", file=sys.stderr)

    generator = fit_generator(
        images,
        width=arguments.width,
        iterations=arguments.iterations,
        seed=arguments.seed,
        told=told,
    )
    public = " ".join([arguments.source, *arguments.set, f"test split, {len(images)} images"])
    write_bytes(arguments.out, pack_generator(generator, public))
    attack = {"name": "generative_prior", "weights": str(arguments.out), "public": public}
    print(json.dumps(attack))


def fit_generator(
    images: Tensor,
    *,
    width: int,
    iterations: int,
    seed: int,
    told: Callable[[int, Tensor], None] = lambda iteration, loss: None,
) -> Generator:
    """Fits a generator of `width` channels to `images`, pixels (M, C, H, W) in [0, 1].

    After each iteration `told` gets its number, from 1, and the mean squared error of its batch
    (0-d). Same arguments, same weights.
    """
    stream = streams.generator(seed, "codes")
    codes = torch.randn(len(images), LATENT, generator=stream).requires_grad_()
    with streams.global_stream(streams.derive(seed, "generator")):
        _, channels, height, columns = images.shape
        generator = Generator((channels, height, columns), LATENT, width)
    optimizer = torch.optim.Adam(
        [
            {"params": generator.parameters(), "lr": _WEIGHT_RATE},
            {"params": [codes], "lr": _CODE_RATE},
        ]
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for iteration in range(1, iterations + 1):
        chosen = torch.randperm(len(images), generator=stream)[:_BATCH]
        loss = F.mse_loss(generator(codes[chosen]), images[chosen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        told(iteration, loss.detach())
    return generator


if __name__ == "__main__":
    main()
