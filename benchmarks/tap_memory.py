"""The server's peak memory against how many clients are recorded in a round.

Every client sends a ResNet-18 update (45 MB), every update is recorded, and FedAvg aggregates them
all. Each count runs in a process of its own, since a process's peak never falls. The figure is the
ratio of the peaks: 1.0 if nothing is held per client. A round of 200 writes about 18 GB.

    python benchmarks/tap_memory.py [--clients 5 50 200] [--strategy FedAvg] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedsim.federation import federate
from fedsim.federation.records import RoundRecord
from fedsim.scenario import Scenario


def scenario(clients: int, strategy: str) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "memory",
            "data": {"source": {"name": "digits"}, "clients": clients},
            "model": {"name": "resnet18", "parameters": {"stem": "imagenet", "norm": "group"}},
            "training": {"rounds": 1, "local": {"steps": 1, "batch_size": 1, "lr": 0.1}},
            "federation": {"strategy": strategy},
            "observe": {"rounds": [1], "clients": "all"},
            "attacks": [],
        }
    )


def child(clients: int, strategy: str, folder: Path) -> None:
    """One round; prints its figures as JSON."""
    records: list[RoundRecord] = []
    start = time.perf_counter()
    federate(scenario(clients, strategy), "none", folder, resume=False, on_round=records.append)
    seen = len(list(folder.glob("observations/none/round-0001/*.json")))
    assert (seen, records[0].aggregated) == (clients, clients)
    figures = {
        "clients": clients,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "update_bytes": records[0].bytes_up // clients,
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(figures))


def measure(clients: int, strategy: str, scratch: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        command = [sys.executable, __file__, "--child", folder, "--clients", str(clients)]
        done = subprocess.run(
            [*command, "--strategy", strategy], stdout=subprocess.PIPE, text=True, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 50, 200])
    parser.add_argument("--strategy", default="FedAvg")
    parser.add_argument("--scratch", type=Path, help="folder for the recordings, removed after")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.clients[0], options.strategy, options.child)
        return
    rows = [measure(clients, options.strategy, options.scratch) for clients in options.clients]
    print(f"{'clients':>8} {'peak MB':>9} {'updates MB':>11} {'seconds':>8} {'ratio':>7}")
    for row in rows:
        row["ratio"] = row["peak_bytes"] / rows[0]["peak_bytes"]
        held = row["clients"] * row["update_bytes"]
        print(
            f"{row['clients']:8} {row['peak_bytes'] / 1e6:9.0f} {held / 1e6:11.0f} "
            f"{row['seconds']:8.1f} {row['ratio']:7.2f}"
        )
    result = {"strategy": options.strategy, "rows": rows}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
