"""Clients per second of training at once (`fedsim.models.local`) against the local engine.

Both train the same networks on the same data, in turns within one run, so that a busy machine slows
both. The engine's clients also pass wire and tap; `serial` trains one client after another without
these. Ratios are of the same repeat. All compute on as many threads as scenarios have by default,
as a worker that attacks does.

    env OMP_NUM_THREADS=2 python benchmarks/shadows.py [--repeats 3] [--case NAME] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fedsim.federation  # sets Flower's environment before Flower is imported
from fedsim.models.base import build, normalize
from fedsim.models.local import gradient, local_update, local_updates, loss_function
from fedsim.scenario import Scenario
from fedsim.system.threads import fix
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import as_pixels

CLIENTS, ROUNDS = 64, 4
LOCAL = {"steps": 5, "batch_size": 16, "lr": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "mlp-64": {"name": "mlp", "hidden": [64]},
    "mlp-256-128": {"name": "mlp"},
    "lenet": {"name": "lenet"},
    "convnet-8": {"name": "convnet", "width": 8},
}


def scenario(model: dict[str, Any]) -> Scenario:
    size = 32 if model["name"] == "convnet" else 8
    parameters = {name: value for name, value in model.items() if name != "name"}
    return Scenario.model_validate(
        {
            "name": "benchmark",
            "attacks": [],
            "data": {
                "source": {"name": "digits", "parameters": {"size": size}},
                "clients": CLIENTS,
                "partition": {"name": "iid"},
            },
            "model": {"name": model["name"], "parameters": parameters},
            "training": {"rounds": ROUNDS, "evaluate_every": ROUNDS, "local": LOCAL},
            "observe": {"rounds": ["last"], "clients": [0]},
        }
    )


def engine_rate(wanted: Scenario, workload: Workload) -> float:
    """Returns clients per second of the local engine, after its first round."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fedsim.federation.federate(
            wanted,
            "none",
            Path(folder),
            resume=False,
            on_round=lambda *_: ends.append(time.perf_counter()),
            server=workload,
        )
    return CLIENTS * (len(ends) - 1) / (ends[-1] - ends[0])


class Shadows:
    """Draws batches for all clients and trains them, at once or one after the other."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.training = workload, workload.training
        self.model = build(workload.spec, 0)
        self.parameters = {n: p.detach() for n, p in self.model.named_parameters()}
        data = workload.dataset
        self.images = normalize(as_pixels(data.train_images), workload.spec)
        self.labels = data.train_labels

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        drawn = [
            torch.stack(
                [
                    c.own[torch.randperm(len(c.own))[: self.training.batch_size]]
                    for c in self.workload.clients
                ]
            )
            for _ in range(self.training.steps)
        ]
        return [(self.images[chosen], self.labels[chosen]) for chosen in drawn]

    def at_once(self) -> float:
        start = time.perf_counter()
        stacked = {n: p.expand(CLIENTS, *p.shape) for n, p in self.parameters.items()}
        local_updates(self.model, stacked, {}, self.batches(), self.training)
        return CLIENTS / (time.perf_counter() - start)

    def one_by_one(self) -> float:
        start, batches = time.perf_counter(), self.batches()
        loss = loss_function(self.model, {}, self.training)
        for k in range(CLIENTS):
            local_update(
                lambda at, images, labels: gradient(loss, at, images, labels),
                self.parameters,
                [(images[k], labels[k]) for images, labels in batches],
                self.training,
            )
        return CLIENTS / (time.perf_counter() - start)


def measure(case: str, repeats: int) -> dict[str, Any]:
    wanted = scenario(CASES[case])
    fix(wanted.threads)
    workload = Workload(wanted, "none", load_dataset(wanted))
    shadows = Shadows(workload)
    shadows.at_once()  # warms up
    engine, together, serial = [], [], []
    for _ in range(repeats):
        engine.append(engine_rate(wanted, workload))
        together.append(statistics.median(shadows.at_once() for _ in range(3)))
        serial.append(shadows.one_by_one())
    ratios = [a / b for a, b in zip(together, engine, strict=True)]
    return {
        "case": case,
        "parameters": sum(p.numel() for p in shadows.parameters.values()),
        "clients": CLIENTS,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "engine_clients_per_second": round(statistics.median(engine), 1),
        "serial_clients_per_second": round(statistics.median(serial), 1),
        "batched_clients_per_second": round(statistics.median(together), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for case in options.case or CASES:
        rows.append(measure(case, options.repeats))
        print(rows[-1], flush=True)
    if options.csv:
        with options.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
