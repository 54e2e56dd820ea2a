"""At what scale should a server plant its neurons, and what does it cost it?

For each `planted_std`: the span error of `best_features` behind each defense of the scenario, the
planted model's test accuracy and loss beside the honest model's (training itself is untouched,
since the server plants only in what it sends with a probe), and what a client could notice: the
length of planted rows of W over that of trained ones, and of its update over an honest one. The
gain of A falls as the scale grows, so that logits stay what they are. Prints JSON lines, and draws.

    python benchmarks/planting.py scenarios/reconstruction/table2.yaml --set KEY=VALUE ...
        [--scales 0.03 0.1 0.3 1 3 10] [--trials 5] [--batch 8] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, create, solve
from fedsim.contracts.grant import Knowledge
from fedsim.scenario import Scenario, expand, open_document
from fedsim.scoring import score
from fedsim.training.schedule import Probe
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset

_GAIN = 0.01
"""Times the scale: what keeps the logits of unnormalized features moderate."""


def measure(scenario: Scenario, dataset: Dataset, trials: int, batch: int) -> dict[str, Any]:
    """One scale."""
    workload = Workload(scenario, next(iter(scenario.defenses)), dataset)
    parameters, buffers = workload.initial()
    planted = workload.plant_probe(parameters, 1)
    head = scenario.model.parameters["head"]
    first = head["width"] - head["planted"]
    rows = torch.linalg.vector_norm(planted["head.hidden.weight"], dim=1)
    probe = Probe(batch_size=batch, trial=0)
    sizes = [
        _norm(workload.client_update(0, 1, weights, buffers, {}, probe=probe).update.tensors)
        for weights in (planted, parameters)
    ]
    found = workload.computation.evaluate(planted, buffers)
    return {
        "scale": head["planted_std"],
        "accuracy": found.accuracy,
        "loss": found.loss,
        "row_ratio": float(rows[first:].median() / rows[:first].median()),
        "update_ratio": sizes[0] / sizes[1],
        "errors": {
            stack: _errors(Workload(scenario, stack, dataset), trials, batch)
            for stack in scenario.defenses
        },
    }


def _errors(workload: Workload, trials: int, batch: int) -> list[float]:
    """Span errors of `best_features`, one a batch; 1 where it fails."""
    parameters, buffers = workload.initial()
    planted = workload.plant_probe(parameters, 1)
    errors = []
    for trial in range(trials):
        probe = Probe(batch_size=batch, trial=trial)
        result = workload.client_update(0, 1, planted, buffers, {}, probe=probe)
        seen = workload.observation(1, 0, result.update, planted, buffers, probe=probe)
        try:
            found = solve(create("best_features"), seen, Knowledge(), seed=trial).reconstruction
        except AttackFailed:
            errors.append(1.0)
            continue
        error = score(found, result.truth)["subspace_error"]
        assert error is not None
        errors.append(error)
    return errors


def _norm(tensors: Any) -> float:
    values: list[Tensor] = list(tensors.values())
    return float(torch.stack([torch.linalg.vector_norm(value) for value in values]).norm())


def draw(rows: list[dict[str, Any]], honest: dict[str, float], path: Path) -> None:
    """Errors over the scale, and what a client could notice."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    scales = [row["scale"] for row in rows]
    for stack in rows[0]["errors"]:
        means = [max(statistics.mean(row["errors"][stack]), 1e-4) for row in rows]
        left.plot(scales, means, marker="o", markersize=4, label=stack)
    left.set(xscale="log", yscale="log", ylim=(7e-5, 1.5))
    left.set_ylabel("mean span error of best_features")
    for key, label in (
        ("row_ratio", "rows of W, planted / trained"),
        ("update_ratio", "client's update, planted / honest"),
    ):
        right.plot(scales, [row[key] for row in rows], marker="o", markersize=4, label=label)
    losses = [row["loss"] / honest["loss"] for row in rows]
    right.plot(scales, losses, marker="o", markersize=4, label="test loss, planted / honest")
    right.axhline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", yscale="log", ylabel="what a client could notice (1: nothing)")
    for axes in (left, right):
        axes.set_xlabel("standard deviation of planted neurons")
        columns = 2 if axes is left else 1
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1, 3, 10])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    dataset, rows, honest = None, [], {}
    for scale in arguments.scales:
        head = [f"model.head.planted_std={scale}", f"model.head.planted_gain={_GAIN / scale}"]
        scenario = expand(open_document(arguments.scenario, arguments.set + head))[0].scenario
        if dataset is None:
            dataset = load_dataset(scenario)
            workload = Workload(scenario, next(iter(scenario.defenses)), dataset)
            honest = vars(workload.computation.evaluate(*workload.initial()))
            print(json.dumps({"honest": honest}), flush=True)
        rows.append(measure(scenario, dataset, arguments.trials, arguments.batch))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.plot:
        draw(rows, honest, arguments.plot)


if __name__ == "__main__":
    main()
