"""Seconds and memory of feature attacks over a head's width m, dimension d of features and B.

Without a defense, and of `best_features` behind noise and pruning too, each in a process of its
own. Prints JSON lines, and draws them. How the error falls with m is tested
(`test_the_error_falls_with_the_root_of_the_width`).

    python benchmarks/features.py [--repeats 3] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from fedsim import rng
from fedsim.contracts.attack import create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.scoring import score
from fedsim.system.memory import peak
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Observation

CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "tensor_features": ("tensor_features", []),
    "spectral_features": ("spectral_features", []),
    "activation_features": ("activation_features", []),
    "head_fit": ("head_fit", []),
    "best_features": ("best_features", []),
    "best_features, noise 0.001": ("best_features", [{"name": "gaussian_noise", "std": 0.001}]),
    "best_features, pruning 0.9": ("best_features", [{"name": "gradient_pruning", "ratio": 0.9}]),
}
"""Label: (attack, defense)."""
MIB = 1 << 20


def observe(
    width: int,
    dimension: int,
    count: int,
    draw: int,
    defense: list[dict[str, Any]],
) -> tuple[Observation, GroundTruth]:
    """The gradient of `count` random unit features behind a head that is wholly planted."""
    stream = rng.generator(draw, "features", width, dimension, count)
    features = F.normalize(torch.randn(count, dimension, generator=stream), dim=1)
    side = 2 ** (int(math.log2(dimension)) // 2)
    # What the model normalizes back to the features: its mean is 0.4, its deviation 0.25.
    images = (0.4 + 0.25 * features).view(count, 1, side, -1)
    planted = {"width": width, "planted": width, "planted_std": 1.0, "planted_gain": 0.01}
    return make_observation(
        images,
        torch.arange(count) * 3 % 10,
        model="mlp",
        model_parameters={"hidden": [], "head": planted},
        defense=defense,
        seed=draw,
    )


def cost(repeats: int) -> list[dict[str, Any]]:
    """Each of m, d and B varied around m = 16384, d = 512, B = 8."""
    cases = [("m", 2**p, 512, 8) for p in (12, 13, 14, 15)]
    cases += [("d", 16384, 2**p, 8) for p in (6, 8, 9, 10)]
    cases += [("B", 16384, 512, 2**p) for p in (0, 2, 3, 4)]
    rows = []
    for name in CASES:
        for axis, width, dimension, count in cases:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured = pool.apply(_cost, (name, width, dimension, count, repeats))
            row = {"attack": name, "axis": axis, "m": width, "d": dimension, "B": count}
            rows.append(row | measured)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _cost(name: str, width: int, dimension: int, count: int, repeats: int) -> dict[str, Any]:
    attack, defense = CASES[name]
    seen, truth = observe(width, dimension, count, 0, defense)
    small, _ = observe(1024, 32, 2, 0, defense)
    solve(create(attack), small, Knowledge(), seed=0)  # what is loaded at first use
    before = peak(torch.device("cpu"))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = solve(create(attack), seen, Knowledge(), seed=0)
        times.append(time.perf_counter() - start)
    used = peak(torch.device("cpu")) - before
    error = score(found.reconstruction, truth)["subspace_error"]
    return {"seconds": statistics.median(times), "peak_mib": used / MIB, "error": error}


def draw_cost(rows: list[dict[str, Any]], path: Path) -> None:
    figure, grid = plt.subplots(2, 3, figsize=(9, 5.6), sharey="row", layout="constrained")
    for column, axis in enumerate("mdB"):
        for name in CASES:
            points = [row for row in rows if row["attack"] == name and row["axis"] == axis]
            for axes, key in zip(grid[:, column], ("seconds", "peak_mib"), strict=True):
                x, y = [row[axis] for row in points], [max(row[key], 0.1) for row in points]
                axes.plot(x, y, marker="o", markersize=3, label=name)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
        grid[1, column].set_xlabel({"m": "neurons m", "d": "dimension d", "B": "batch B"}[axis])
    grid[0, 0].set_ylabel("seconds")
    grid[1, 0].set_ylabel("MiB above the data")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = cost(arguments.repeats)
    if arguments.plot:
        draw_cost(rows, arguments.plot)


if __name__ == "__main__":
    main()
