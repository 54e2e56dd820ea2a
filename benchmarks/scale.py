"""Memory and seconds of the server for each client and parameter, on an engine of this machine.

Each case is a run of its own in a child process, whose peak resident memory and rounds are read.
Slopes over clients and parameters are what docs/scale.md extrapolates from.

    python benchmarks/scale.py [--engine local] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_CHILD = """
import json, resource, sys
from fedsim import pipeline
scenario, out = json.loads(sys.argv[1]), sys.argv[2]
pipeline.run(scenario, out=out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def case(
    engine: str, clients: int, participation: float, hidden: int, rounds: int
) -> dict[str, Any]:
    """Figures of one federation of multilayer perceptrons with `hidden` neurons."""
    scenario = {
        "name": "scale",
        "data": {"source": {"name": "digits", "size": 8}, "clients": clients},
        "model": {"name": "mlp", "hidden": [hidden]},
        "training": {
            "rounds": rounds,
            "evaluate_every": rounds,
            "local": {"steps": 1, "batch_size": 1, "lr": 0.1},
        },
        "federation": {
            "engine": engine,
            "participation": participation,
            "checkpoint_every": rounds,
        },
        "attacks": [],
    }
    with tempfile.TemporaryDirectory(prefix="fedsim-scale-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps(scenario), f"{folder}/out"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        lines = Path(folder, "out", "rounds.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line)["seconds"]) for line in lines][1:]
    parameters = 64 * hidden + hidden + 10 * hidden + 10
    return {
        "clients": clients,
        "participants": round(clients * participation),
        "parameters": parameters,
        "seconds_per_round": sum(seconds) / len(seconds),
        "peak_mib": int(done.stdout.split()[-1]) / 1024,
    }


def main() -> None:
    """Print a line for each case, and the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="local")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clients = [20, 100] if given.quick else [20, 100, 400, 1000]
    sizes = [64, 1024] if given.quick else [64, 1024, 16384, 65536]
    found = [case(given.engine, count, 0.05, 64, 4) for count in clients]
    found += [case(given.engine, 20, 0.5, hidden, 4) for hidden in sizes]
    for each in found:
        print(
            f"{each['clients']:5} clients {each['participants']:4} a round "
            f"{each['parameters']:9,} parameters: {each['seconds_per_round']:7.3f} s a round, "
            f"peak {each['peak_mib']:6.0f} MiB",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
