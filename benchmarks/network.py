"""Seconds a round of fedsim over a network, against a plain Flower app on the same engine.

Both train the same network (lenet's parameters) with three clients over a SuperLink and SuperNodes
on this machine: fedsim by `fedsim up` (TLS, authenticated nodes, gate, tap, checkpoints), the plain
app by `flwr run` without any of these, which starts a process for each message. Local and
simulation engine of fedsim stand beside them. The first round is left out of the means: it waits
for imports.

    python benchmarks/network.py [--rounds 6] [--clients 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedsim import deploying, pipeline
from fedsim.federation.network.superlink import Child, free_port, program

_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "plain-app"
version = "1.0.0"
description = "A plain Flower app"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "plain_app.server:app"
clientapp = "plain_app.client:app"

[tool.flwr.app.config]
rounds = 1
"""
_MODEL = """\
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2, stride=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2, stride=2), nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(768, 10),
    )
"""
_SERVER = """\
import time

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from plain_app.model import model

app = ServerApp()


class Timed(FedAvg):
    def configure_train(self, *given):
        self.begun = time.perf_counter()
        return super().configure_train(*given)

    def aggregate_train(self, *given):
        done = super().aggregate_train(*given)
        print(f"ROUND {time.perf_counter() - self.begun:.3f}", flush=True)
        return done


@app.main()
def main(grid, context):
    strategy = Timed(fraction_evaluate=0.0)
    arrays = ArrayRecord(model().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=context.run_config["rounds"])
"""
_CLIENT = """\
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plain_app.model import model

app = ClientApp()


@app.train()
def train(message, context):
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = torch.rand(8, 1, 32, 32), torch.randint(10, (8,))
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.01 * parameter.grad
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": 8}),
    }
    return Message(RecordDict(content), reply_to=message)
"""


def fedsim_rounds(engine: str, clients: int, rounds: int, folder: Path) -> list[float]:
    """Seconds of each round of fedsim on `engine`."""
    scenario = {
        "name": "network",
        "data": {"source": "digits", "clients": clients},
        "model": "lenet",
        "training": {"rounds": rounds, "local": {"steps": 1, "batch_size": 8, "lr": 0.01}},
        "attacks": [],
    }
    out = folder / engine
    if engine == "deployment":
        path = folder / "network.yaml"
        path.write_text(json.dumps(scenario))
        deploying.up(path, out=out)
    else:
        pipeline.run({**scenario, "federation": {"engine": engine}}, out=out)
    lines = (out / "rounds.jsonl").read_text().splitlines()
    return [float(json.loads(line)["seconds"]) for line in lines]


def plain_rounds(clients: int, rounds: int, folder: Path) -> list[float]:
    """Seconds of each round of the plain app."""
    app = folder / "app" / "plain_app"
    app.mkdir(parents=True)
    (app.parent / "pyproject.toml").write_text(_APP)
    for name, text in (
        ("__init__", ""),
        ("model", _MODEL),
        ("server", _SERVER),
        ("client", _CLIENT),
    ):
        (app / f"{name}.py").write_text(text)
    home, port = folder / "flwr", free_port()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    os.environ["FLWR_HOME"] = str(home)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    children = [
        Child(
            [
                *(program("flower-superlink"), "--insecure", "--port", str(port)),
                "--disable-runtime-dependency-installation",
            ],
            folder / "superlink.log",
        )
    ]
    try:
        children[0].await_port(port)
        children += [
            Child(
                [
                    *(
                        program("flower-supernode"),
                        "--insecure",
                        "--superlink",
                        f"127.0.0.1:{port}",
                    ),
                    *("--port", str(free_port())),
                ],
                folder / f"node-{client}.log",
            )
            for client in range(clients)
        ]
        time.sleep(8)  # nodes have to be there when the strategy samples
        done = subprocess.run(
            [
                *(program("flwr"), "run", str(app.parent), "here"),
                *("--run-config", f"rounds={rounds}", "--stream"),
            ],
            capture_output=True,
            text=True,
            timeout=1800,
        )
    finally:
        for child in reversed(children):
            child.stop()
    said = done.stdout + done.stderr + (folder / "superlink.log").read_text(errors="replace")
    found = [float(seconds) for seconds in re.findall(r"ROUND ([\d.]+)", said)][:rounds]
    if len(found) < rounds:
        raise SystemExit(f"the plain app did {len(found)} of {rounds} rounds:\n{said[-3000:]}")
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fedsim-benchmark-") as name:
        folder = Path(name)
        for engine in ("local", "simulation", "deployment"):
            found[engine] = fedsim_rounds(engine, given.clients, given.rounds, folder)[1:]
        found["plain Flower app"] = plain_rounds(given.clients, given.rounds, folder)[1:]
    means = {name: statistics.mean(seconds) for name, seconds in found.items()}
    for name, seconds in found.items():
        print(f"{name:18} {means[name]:7.2f} s a round ({min(seconds):.2f} to {max(seconds):.2f})")
    print(f"deployment / plain {means['deployment'] / means['plain Flower app']:7.2f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
