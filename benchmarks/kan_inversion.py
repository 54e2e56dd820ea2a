"""What the update of a Kolmogorov-Arnold network tells of its images, and what of it attacks find.

Victims are bundled digits of 8x8 pixels and freshly drawn networks, one gradient each, labels known
to `inverting_gradients` alone. Prints JSON lines, PSNR in dB by victim:

    python benchmarks/kan_inversion.py matching [--seeds 8]     # gradient matching by intervals
    python benchmarks/kan_inversion.py closed_form [--seeds 8]  # spline_inversion by batch
    python benchmarks/kan_inversion.py noise [--seeds 8]        # spline_inversion by noise

Beside gradient matching stands what a single entry explains of its failure: pixels start where the
attack does (N(0, 1), normalized), go down |b(u) - b(u*)|² (b the spline basis at u = tanh(x), u* of
true pixels) by small steps, and `arrive` is the share that ends at the truth.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Digits
from fedsim.models.kan import spline_basis
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients
from fedsim_attacks.kan.spline_inversion import SplineInversion

MEAN, STD = 0.4, 0.25  # of make_observation's normalization
GRID, PAIRS = 4001, 20_000
DATA = Digits(size=8).load()


def victim(
    seed: int, count: int, defense: Any = (), **model: Any
) -> tuple[Observation, GroundTruth]:
    """A gradient of `count` digits."""
    order = torch.randperm(len(DATA.train_images), generator=rng.generator(seed, "victims"))
    return make_observation(
        DATA.train_images[order[:count]].float() / 255,
        DATA.train_labels[order[:count]],
        model="kan",
        model_parameters={"hidden": 16, "intervals": 4, "init_scale": 0.5, **model},
        defense=defense,
        seed=seed,
    )


def psnr(attack: Attack[Any], observation: Observation, truth: GroundTruth) -> list[float]:
    """Of each image, in the order that suits best."""
    knowledge = Knowledge(grant=Grant(labels="known"), true_labels=truth.labels)
    found = solve(attack, observation, knowledge, seed=0).reconstruction.images
    assert found is not None
    errors = (found[:, None] - truth.images[None]).square().mean((2, 3, 4))
    chosen = errors[linear_sum_assignment(errors)]
    return [round(float(value), 2) for value in -10 * chosen.clamp_min(1e-20).log10()]


def arrive(degree: int, intervals: int) -> float:
    """Share of single pixels that descent takes to the truth."""
    stream = rng.generator(0, "pixels")
    low, high = -MEAN / STD, (1 - MEAN) / STD
    x = torch.linspace(low, high, GRID, dtype=torch.float64)
    basis = spline_basis(x.tanh(), degree, intervals)
    square = basis.square().sum(1)
    distance = square[:, None] + square - 2 * basis @ basis.T

    def nearest(values: Tensor) -> Tensor:
        return ((values - low) / (high - low) * (GRID - 1)).round().long().clamp(0, GRID - 1)

    pixels = DATA.train_images.double().flatten() / 255
    chosen = torch.randint(len(pixels), (PAIRS,), generator=stream)
    true = nearest((pixels[chosen] - MEAN) / STD)
    at = nearest(torch.randn(PAIRS, generator=stream, dtype=torch.float64))
    # Where each node leads: to its lower neighbour, if one is lower; repeated by squaring.
    padded = torch.nn.functional.pad(distance.T, (1, 1), value=torch.inf)
    around = torch.stack([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]])
    leads = around.argmin(0) - 1 + torch.arange(GRID)
    for _ in range(GRID.bit_length()):
        leads = leads.gather(1, leads)
    off = (leads[true, at] - true).abs() * (high - low) / (GRID - 1) * STD
    return float((off < 0.01).double().mean())


def matching(seeds: int) -> None:
    """By intervals, with the default weight of the total variation and without."""
    for intervals in (1, 2, 3, 4, 6, 8):
        for variation in (0.1, 0.0):
            attack = InvertingGradients(iterations=600, total_variation=variation)
            figures = [psnr(attack, *victim(seed, 1, intervals=intervals)) for seed in range(seeds)]
            show(
                intervals=intervals,
                total_variation=variation,
                arrive=round(arrive(3, intervals), 3),
                psnr=figures,
            )


def closed_form(seeds: int) -> None:
    """By batch and splines, 16 hidden units."""
    for degree, intervals in ((3, 4), (5, 4), (3, 8)):
        for train in ("all", "first"):
            for count in (1, 4, 8, 12, 16):
                model = {"degree": degree, "intervals": intervals, "train": train}
                figures = [
                    psnr(SplineInversion(), *victim(seed, count, **model)) for seed in range(seeds)
                ]
                show(count=count, **model, psnr=figures)


def noise(seeds: int) -> None:
    """Of gradients that are clipped to norm 1, so that `std` is relative to that."""
    for std in (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1):
        defense = [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "std": std}]
        for count in (1, 4, 8):
            figures = [
                psnr(SplineInversion(), *victim(seed, count, defense)) for seed in range(seeds)
            ]
            show(count=count, std=std, psnr=figures)


def show(psnr: list[list[float]], **row: Any) -> None:
    """One line: the parameters, and mean and least PSNR before all of them."""
    figures = [figure for victim in psnr for figure in victim]
    summary = {"mean": round(sum(figures) / len(figures), 1), "least": min(figures)}
    print(json.dumps({**row, **summary, "psnr": figures}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["matching", "closed_form", "noise"])
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    parts = {"matching": matching, "closed_form": closed_form, "noise": noise}
    parts[arguments.part](arguments.seeds)
