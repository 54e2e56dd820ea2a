"""Rounds per second of fedsim against a plain Flower app: what recording and screening cost.

Both train the same model on the same data with the same clients and the same in-process grid (or,
with --ray, both on Flower's simulation engine), in turns within one run, so that a busy machine
slows both. fedsim records, screens and writes a checkpoint every round, as by default; the plain
app is Flower's PyTorch quickstart. The figure is the ratio: 1.0 would be a free tap.

    python benchmarks/federation.py [--repeats 5] [--case NAME] [--ray] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedsim.federation  # sets Flower's environment before Flower is imported
from fedsim.models.base import build, normalize
from fedsim.scenario import Scenario
from fedsim.scenario.model import LocalSection
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import as_pixels

CASES: dict[str, dict[str, Any]] = {
    "mlp, 10 clients": {
        "data": {"source": {"name": "digits"}, "clients": 10},
        "model": {"name": "mlp"},
        "training": {"rounds": 20, "local": {"steps": 5, "batch_size": 32, "lr": 0.1}},
    },
    "convnet, 10 clients": {
        "data": {"source": {"name": "digits"}, "clients": 10},
        "model": {"name": "convnet", "parameters": {"width": 16}},
        "training": {"rounds": 12, "local": {"steps": 2, "batch_size": 16, "lr": 0.1}},
    },
    "resnet18, 4 clients": {
        "data": {"source": {"name": "digits"}, "clients": 4},
        "model": {"name": "resnet18", "parameters": {"stem": "imagenet"}},
        "training": {"rounds": 6, "local": {"steps": 2, "batch_size": 8, "lr": 0.05}},
    },
}


@dataclass(frozen=True)
class Speed:
    """Rounds per second of wall time, and of this process's CPU time (not with --ray)."""

    wall: float
    cpu: float


class Clock:
    """Told at the end of every round; the first is warming up."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def tick(self, *_: object) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def speed(self) -> Speed:
        (wall, cpu), (last_wall, last_cpu) = self.ends[0], self.ends[-1]
        rounds = len(self.ends) - 1
        return Speed(rounds / (last_wall - wall), rounds / (last_cpu - cpu))


def scenario(case: str, engine: str) -> Scenario:
    return Scenario.model_validate(
        {"name": "benchmark", "attacks": [], "federation": {"engine": engine}, **CASES[case]}
    )


def run_fedsim(wanted: Scenario, workload: Workload) -> Speed:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        fedsim.federation.federate(
            wanted,
            "none",
            Path(folder),
            resume=False,
            on_round=clock.tick,
            server=workload,
        )
    return clock.speed()


class PlainClient:
    """The client of Flower's PyTorch quickstart, with its data in memory."""

    def __init__(self, scenario_json: str) -> None:
        self.scenario_json = scenario_json

    def train(self, message: Any, context: Any) -> Any:
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        local, model, data = _prepared(self.scenario_json)
        images, labels = data[int(context.node_config["partition-id"])]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        running = 0.0
        for _ in range(local.steps):
            chosen = torch.randperm(len(labels))[: local.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            torch.autograd.backward(loss)
            optimizer.step()
            running += loss.item()
        metrics = MetricRecord(
            {"train_loss": running / local.steps, "num-examples": local.steps * local.batch_size}
        )
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)


@lru_cache(maxsize=1)
def _prepared(
    scenario_json: str,
) -> tuple[LocalSection, nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Local training, a model, and each client's normalized data: once per process."""
    wanted = Scenario.model_validate_json(scenario_json)
    workload = Workload(wanted, "none")
    pixels = as_pixels(workload.dataset.train_images)
    images, labels = normalize(pixels, workload.spec), workload.dataset.train_labels
    data = [(images[part], labels[part]) for part in workload.parts]
    return wanted.training.local, build(workload.spec, 0), data


def run_plain(wanted: Scenario, workload: Workload) -> Speed:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from fedsim.federation import local

    model = build(workload.spec, 0)
    test = normalize(as_pixels(workload.dataset.test_images), workload.spec)
    clock = Clock()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(chunk) for chunk in torch.split(test, 256)])
        target = workload.dataset.test_labels
        loss = F.cross_entropy(logits, target).item()
        accuracy = (logits.argmax(1) == target).float().mean().item()
        if round:
            clock.tick()
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    server, client = ServerApp(), ClientApp()
    shared = PlainClient(wanted.model_dump_json())
    client.train()(shared.train)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        while len(list(grid.get_node_ids())) < wanted.data.clients:
            time.sleep(0.1)
        FedAvg(fraction_evaluate=0.0).start(
            grid=grid,
            initial_arrays=ArrayRecord(model.state_dict()),
            num_rounds=wanted.training.rounds,
            evaluate_fn=evaluate,
        )

    if wanted.federation.engine == "local":
        _prepared(shared.scenario_json)
        local.run_apps(server, client, wanted.data.clients, 600.0)
    else:
        from flwr.simulation import run_simulation

        run_simulation(server, client, wanted.data.clients, backend_config=_one_core_each())
    return clock.speed()


def _one_core_each() -> dict[str, Any]:
    init = {"log_to_driver": False, "logging_level": "ERROR"}
    return {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def measure(case: str, repeats: int, engine: str) -> dict[str, Any]:
    wanted = scenario(case, engine)
    workload = Workload(wanted, "none", load_dataset(wanted))
    ours: list[Speed] = []
    plain: list[Speed] = []
    for repeat in range(repeats):
        pair = [(plain, run_plain), (ours, run_fedsim)]
        for kept, run in pair if repeat % 2 else reversed(pair):
            kept.append(run(wanted, workload))
    wall = [a.wall / b.wall for a, b in zip(ours, plain, strict=True)]
    cpu = [a.cpu / b.cpu for a, b in zip(ours, plain, strict=True)]
    return {
        "case": case,
        "engine": engine,
        "fedsim_rounds_per_second": statistics.median(speed.wall for speed in ours),
        "plain_rounds_per_second": statistics.median(speed.wall for speed in plain),
        "ratio": statistics.median(wall),
        "ratios": wall,
        "cpu_ratio": statistics.median(cpu) if engine == "local" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--ray", action="store_true", help="both on Flower's simulation engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = "simulation" if options.ray else "local"
    rows = []
    print(f"{'case':22} {'fedsim r/s':>11} {'plain r/s':>11} {'ratio':>6} {'of CPU':>7}  spread")
    for case in options.case or CASES:
        row = measure(case, options.repeats, engine)
        rows.append(row)
        cpu = "" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.2f}"
        print(
            f"{case:22} {row['fedsim_rounds_per_second']:11.2f} "
            f"{row['plain_rounds_per_second']:11.2f} {row['ratio']:6.2f} {cpu:>7}  "
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}",
            flush=True,
        )
    result = {"threads": torch.get_num_threads(), "rows": rows}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # By name, so that Ray's workers import this module too and keep its cache.
    import_module("federation").main()
