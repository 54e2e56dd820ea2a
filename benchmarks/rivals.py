"""Attacks of the public suites on a run's own recordings, beside fedsim's.

Every suite gets the same recorded update, the model at the same weights, the same number of
iterations and the true labels, from a start of its own. None gets an image. fedsim scores what each
answers, and the guess that gains are over knows the labels, too. Suites:
- `breaching` (Geiping and others), its `invertinggradients` and `modern`;
- `LeakPro` (AI Sweden), its `InvertingGradients`: by itself it computes the update from the true
  images and hands in the iterate that is most like them; here it gets the recorded update and hands
  in the one of least own loss.
A suite that cannot be imported is left out, and the output says so. One JSON line an attack: mean
over recordings and 95% Student's interval.

    python benchmarks/rivals.py RUN [--stack none] [--round 1] [--batch-size 1]
                                [--iterations 500] [--recordings 8] [--only SUITE] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attack import Runner, breaching_runner, fedsim_runner
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedsim.models.base import denormalize
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_observation
from fedsim.recording.truth import load_truth
from fedsim.scenario import expand, open_document
from fedsim.scoring import Guesser, score, summarize
from fedsim.training.source import load_dataset
from fedsim.types import Dataset, GroundTruth, Observation, Reconstruction


def leakpro_runner(observation: Observation, truth: GroundTruth) -> Runner:
    """LeakPro's attack on the recorded gradient, with gray in the place of the client's images."""
    from leakpro.attacks.gia_attacks import invertinggradients as suite

    spec = observation.model
    gray = torch.zeros(truth.images.shape)
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))

    def run(iterations: int, length: int) -> Tensor:
        torch.manual_seed(0)
        config = suite.InvertingConfig(at_iterations=length)
        loader = DataLoader(TensorDataset(gray, truth.labels), batch_size=len(gray))
        attack = suite.InvertingGradients(rebuild(observation), loader, mean, std, configs=config)
        attack.prepare_attack()
        # Its training returns the step of the weights, which is the gradient over -1 / lr.
        attack.client_gradient = [-config.optimizer.lr * g for g in observation.update.values()]
        loop = attack.generic_attack_loop(
            config,
            attack.gradient_closure,
            iterations,
            attack.reconstruction,
            mean,
            std,
            config.attack_lr,
            config.median_pooling,
            attack.client_loader,
            attack.reconstruction_loader,
            chose_best_ssim_as_final=False,
        )
        for _ in loop:
            pass
        found = attack.best_reconstruction.dataset.reconstruction.detach()
        return denormalize(found, spec).clamp(0, 1)

    return run


SUITES: dict[str, tuple[str, Callable[[Observation, GroundTruth], Runner | None]]] = {
    "fedsim inverting_gradients": ("fedsim", fedsim_runner),
    "fedsim deep_leakage": ("fedsim", partial(fedsim_runner, name="deep_leakage")),
    "breaching invertinggradients": ("breaching", breaching_runner),
    "breaching modern": ("breaching", partial(breaching_runner, configuration="modern")),
    "LeakPro InvertingGradients": ("leakpro", leakpro_runner),
}
"""Name: (package, runner)."""


def recordings(run: Path, stack: str, round: int, batch_size: int) -> list[Path]:
    """The recordings of single updates of so many images, one a trial and client."""
    folder = run / "observations" / stack / f"round-{round:04d}"
    return sorted(folder.glob(f"client-*-b{batch_size}-t*.json"))


def attacked(
    make: Callable[[Observation, GroundTruth], Runner | None],
    paths: list[Path],
    run: Path,
    iterations: int,
    guesser: Guesser,
) -> dict[str, Any]:
    """What one attack gains over the recordings, and what it takes."""
    gains, psnrs, ssims, seconds = [], [], [], []
    for path in paths:
        observation = load_observation(path)
        if observation.training.algorithm != "fedsgd":
            raise SystemExit(f"{path}: no gradient; the suites get one gradient of fedsgd each")
        truth = load_truth(run, observation.id, observation.num_clients)
        assert isinstance(truth, GroundTruth)
        runner = make(observation, truth)
        assert runner is not None
        began = time.perf_counter()
        images = runner(iterations, iterations)
        seconds.append(time.perf_counter() - began)
        scores = score(Reconstruction(images=images, loss=0.0, iterations=iterations), truth)
        guess = score(guesser(len(truth.labels), truth.labels.tolist()).answer(), truth)
        own, other = scores["psnr"], guess["psnr"]
        assert own is not None and other is not None
        gains.append(own - other)
        psnrs.append(own)
        ssims.append(scores["ssim"])
    return {
        "n": len(paths),
        "gain": interval(gains),
        "psnr": interval(psnrs),
        "ssim": interval([value for value in ssims if value is not None]),
        "seconds": round(sum(seconds) / len(seconds), 1),
    }


def interval(values: list[float]) -> dict[str, float | None] | None:
    """Mean and interval, rounded."""
    found = summarize(values)
    if found is None:
        return None
    ends = {"mean": found.mean, "low": found.low, "high": found.high}
    return {k: None if v is None else round(v, 2) for k, v in ends.items()}


def version(package: str) -> str:
    """Of a package; `source` of one that is imported from its source."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run whose federation is of fedsgd")
    parser.add_argument("--stack", default="none")
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--recordings", type=int, default=8, help="at most so many")
    parser.add_argument("--only", choices=SUITES, action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    paths = recordings(arguments.run, arguments.stack, arguments.round, arguments.batch_size)
    if not paths:
        raise SystemExit(
            f"{arguments.run}: no recording of stack {arguments.stack}, round {arguments.round}, "
            f"batch size {arguments.batch_size}; see its observations/"
        )
    scenario = expand(open_document(arguments.run / "scenario.yaml", []))[0].scenario
    data = load_dataset(scenario)
    assert isinstance(data, Dataset)
    guesser = Guesser(data.test_images, data.test_labels)
    paths = paths[: arguments.recordings]
    rows = []
    for name in arguments.only or SUITES:
        package, make = SUITES[name]
        row: dict[str, Any] = {"attack": name, "stack": arguments.stack}
        row |= {"round": arguments.round, "batch_size": arguments.batch_size}
        if importlib.util.find_spec(package) is None:
            row |= {"left_out": f"{package} cannot be imported here"}
        else:
            try:
                row |= attacked(make, paths, arguments.run, arguments.iterations, guesser)
            except (RuntimeError, ValueError) as error:  # a suite that cannot take these images
                row |= {"left_out": str(error).splitlines()[0]}
            row |= {"iterations": arguments.iterations, "version": version(package)}
            row |= {"torch": torch.__version__, "machine": platform.machine()}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
