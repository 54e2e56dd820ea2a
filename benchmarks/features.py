"""Feature attacks over the head's width m, the features' dimension d and the batch size B.

`rate`: the error of `tensor_features` on random unit features falls as m^(-1/2), as Liu et al.,
Data Reconstruction Attacks and Defenses, prove. `cost`: seconds and peak memory of each attack over
m, d and B, without a defense, and of `best_features` behind noise and pruning too, each in a
process of its own. Prints JSON lines, and draws them.

    python benchmarks/features.py rate [--draws 10] [--plot FILE.png]
    python benchmarks/features.py cost [--repeats 3] [--plot FILE.png]
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
    defense: list[dict[str, Any]] | None = None,
    **head: Any,
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
        model_parameters={"hidden": [], "head": {**planted, **head}},
        defense=defense or [],
        seed=draw,
    )


def rate(draws: int) -> list[dict[str, Any]]:
    """Mean subspace error at d = 32 over m, and the slope of its logarithm."""
    rows = []
    for count in (1, 2, 4):
        curve = []
        for power in range(12, 19):
            errors = []
            for draw in range(draws):
                seen, truth = observe(2**power, 32, count, draw, planted_rows="two_groups")
                found = solve(create("tensor_features"), seen, Knowledge(), seed=draw)
                error = score(found.reconstruction, truth)["subspace_error"]
                assert error is not None
                errors.append(error)
            curve.append((power, statistics.mean(errors)))
            row = {"batch": count, "width": 2**power, "error": curve[-1][1], "draws": draws}
            rows.append(row | {"deviation": statistics.stdev(errors)})
            print(json.dumps(rows[-1]), flush=True)
        slope = statistics.linear_regression(
            [power * math.log(2) for power, _ in curve], [math.log(e) for _, e in curve]
        ).slope
        rows.append({"batch": count, "slope": slope})
        print(json.dumps(rows[-1]), flush=True)
    return rows


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


def draw_rate(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for count in (1, 2, 4):
        points = [row for row in rows if row["batch"] == count and "error" in row]
        (slope,) = (row["slope"] for row in rows if row["batch"] == count and "slope" in row)
        axes.errorbar(
            [row["width"] for row in points],
            [row["error"] for row in points],
            [row["deviation"] / row["draws"] ** 0.5 for row in points],
            marker="o",
            markersize=4,
            capsize=2,
            label=f"B = {count}: slope {slope:.2f}",
        )
    widths = sorted({row["width"] for row in rows if "width" in row})
    start = next(row["error"] for row in rows if row["batch"] == 1)
    theory = [start * (width / widths[0]) ** -0.5 for width in widths]
    axes.plot(widths, theory, color="grey", linestyle="--", label="$m^{-1/2}$")
    axes.set(xscale="log", yscale="log", xlabel="planted neurons m", ylabel="mean span error")
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


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
    parser.add_argument("what", choices=("rate", "cost"))
    parser.add_argument("--draws", type=int, default=10, help="of rate")
    parser.add_argument("--repeats", type=int, default=3, help="of cost")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    is_rate = arguments.what == "rate"
    rows = rate(arguments.draws) if is_rate else cost(arguments.repeats)
    if arguments.plot:
        (draw_rate if is_rate else draw_cost)(rows, arguments.plot)


if __name__ == "__main__":
    main()
