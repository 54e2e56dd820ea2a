"""Rounds per second of fedsim against a plain Flower app: what recording and screening cost.

Both train the same model on the same data with the same clients and the same in-process grid (or,
with --ray, both on Flower's simulation engine), in turns within one run, so that a busy machine
slows both. fedsim records, screens and writes a checkpoint every round, as by default; the plain
app is Flower's PyTorch quickstart. The figure is the ratio: 1.0 would be a free tap.

    python benchmarks/federation.py [--repeats 5] [--rounds 20] [--ray] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fedsim.federation  # sets Flower's environment before Flower is imported
from fedsim.models.base import build, normalize
from fedsim.scenario import Scenario
from fedsim.workload import Workload, as_pixels, load_dataset

CASES: dict[str, dict[str, Any]] = {
    "mlp, 10 clients, batch 32": {
        "data": {"source": {"name": "digits"}, "clients": 10},
        "model": {"name": "mlp"},
        "training": {"local": {"steps": 5, "batch_size": 32, "lr": 0.1}},
    },
    "convnet, 10 clients, batch 32": {
        "data": {"source": {"name": "digits"}, "clients": 10},
        "model": {"name": "convnet"},
        "training": {"local": {"steps": 1, "batch_size": 32, "lr": 0.1}},
    },
    "resnet18, 4 clients, batch 8": {
        "data": {"source": {"name": "digits"}, "clients": 4},
        "model": {"name": "resnet18", "parameters": {"stem": "imagenet"}},
        "training": {"local": {"steps": 1, "batch_size": 8, "lr": 0.05}},
    },
}


def scenario(case: str, rounds: int, engine: str) -> Scenario:
    plain: dict[str, Any] = {"name": "benchmark", "attacks": [], **CASES[case]}
    plain["training"] = {**plain["training"], "rounds": rounds}
    plain["federation"] = {"engine": engine}
    return Scenario.model_validate(plain)


def fedsim_rounds_per_second(wanted: Scenario, workload: Workload) -> float:
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fedsim.federation.federate(
            wanted,
            "none",
            Path(folder),
            resume=False,
            on_round=lambda record: ends.append(time.perf_counter()),
            workload=workload,
        )
    return (len(ends) - 1) / (ends[-1] - ends[0])


class PlainClient:
    """The client of Flower's PyTorch quickstart, with its data in memory."""

    def __init__(self, scenario_json: str) -> None:
        self.scenario_json = scenario_json
        self.ready: tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] | None = None

    def __reduce__(self) -> Any:
        return PlainClient, (self.scenario_json,)

    def train(self, message: Any, context: Any) -> Any:
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        local = Scenario.model_validate_json(self.scenario_json).training.local
        if self.ready is None:
            self.ready = _model_and_data(
                Workload(Scenario.model_validate_json(self.scenario_json), "none")
            )
        model, data = self.ready
        images, labels = data[int(context.node_config["partition-id"])]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        running = 0.0
        for _ in range(local.steps):
            chosen = torch.randperm(len(labels))[: local.batch_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            running += loss.item()
        metrics = {
            "train_loss": running / local.steps,
            "num-examples": local.steps * local.batch_size,
        }
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)


def _model_and_data(
    workload: Workload,
) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    pixels = as_pixels(workload.dataset.train_images)
    images, labels = normalize(pixels, workload.spec), workload.dataset.train_labels
    return build(workload.spec, 0), [(images[part], labels[part]) for part in workload.parts]


def plain_rounds_per_second(wanted: Scenario, workload: Workload) -> float:
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from fedsim.federation import local

    model, _ = _model_and_data(workload)
    test = normalize(as_pixels(workload.dataset.test_images), workload.spec)
    ends: list[float] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(chunk) for chunk in test.split(256)])
        target = workload.dataset.test_labels
        loss = F.cross_entropy(logits, target).item()
        accuracy = (logits.argmax(1) == target).float().mean().item()
        if round:
            ends.append(time.perf_counter())
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
        shared.ready = _model_and_data(workload)
        local.run(server, client, wanted.data.clients, 600.0)
    else:
        from flwr.simulation import run_simulation

        run_simulation(server, client, wanted.data.clients, backend_config=_one_core_each())
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _one_core_each() -> dict[str, Any]:
    init = {"log_to_driver": False, "logging_level": "ERROR"}
    return {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def measure(case: str, rounds: int, repeats: int, engine: str) -> dict[str, Any]:
    wanted = scenario(case, rounds, engine)
    workload = Workload(wanted, "none", load_dataset(wanted))
    ours, plain = [], []
    for repeat in range(repeats):
        pair = [(plain, plain_rounds_per_second), (ours, fedsim_rounds_per_second)]
        for kept, function in pair if repeat % 2 else reversed(pair):
            kept.append(function(wanted, workload))
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    return {
        "case": case,
        "engine": engine,
        "fedsim_rounds_per_second": statistics.median(ours),
        "plain_rounds_per_second": statistics.median(plain),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--ray", action="store_true", help="both on Flower's simulation engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = "simulation" if options.ray else "local"
    rows = []
    print(f"{'case':32} {'fedsim r/s':>11} {'plain r/s':>11} {'ratio':>7}  spread")
    for case in options.case or CASES:
        row = measure(case, options.rounds, options.repeats, engine)
        rows.append(row)
        print(
            f"{case:32} {row['fedsim_rounds_per_second']:11.2f} "
            f"{row['plain_rounds_per_second']:11.2f} {row['ratio']:7.2f}  "
            f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        )
    result = {"threads": torch.get_num_threads(), "rounds": options.rounds, "rows": rows}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
