"""A federation on this machine under faults: are all rounds accounted for, and is anything left?

Every few rounds a node, two nodes, the SuperLink or the gate are killed, or a node is stopped for
longer than the federation's timeout. Reported are rounds, answers and failures (in every round they
add up to the participants), how soon a killed node takes part again, and, of each program, memory
and open files after the first and the last tenth of the rounds; at the end, what is left of
processes and temporary files.

    python benchmarks/soak.py [--rounds 200] [--every 5] [--nodes 3] [--out DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedsim import pipeline
from fedsim.federation.network.node import JOINED
from fedsim.federation.network.up import RunningFederation, federation

_MARK = "FEDSIM_SOAK"
"""Variable by which processes that a soak has started are told from others."""
_POLL_SECONDS = 0.05
_NEVER_SECONDS = 300.0

Fault = Callable[[RunningFederation], float | None]
"""Strikes, and returns after how many seconds the SuperLink had let the nodes in again, if any."""


def scenario(rounds: int, nodes: int, timeout: float) -> dict[str, Any]:
    """A federation whose rounds cost nothing but their messages."""
    return {
        "name": "soak",
        "seed": 3,
        "data": {"source": {"name": "digits", "size": 8}, "clients": nodes},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {
            "rounds": rounds,
            "evaluate_every": rounds,
            "local": {"steps": 1, "batch_size": 4, "lr": 0.1},
        },
        "federation": {"engine": "deployment", "timeout": timeout},
        "defenses": {"none": []},
        "attacks": [{"name": "label_inference"}],
        "observe": {"rounds": ["last"], "clients": [0]},
    }


def kill_node(*clients: int) -> Fault:
    """Kill the nodes of these clients, with all that they have started."""

    def strike(there: RunningFederation) -> float:
        killed = [there.nodes()[client] for client in clients]
        begun = time.monotonic()
        for node in killed:
            os.kill(node.pid, signal.SIGKILL)
        while any(
            there.nodes()[client] is node or JOINED not in there.nodes()[client].words()
            for client, node in zip(clients, killed, strict=True)
        ):
            if time.monotonic() - begun > _NEVER_SECONDS:
                return float("inf")
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - begun

    strike.__name__ = f"kill {'node' if len(clients) == 1 else 'two nodes'}"
    return strike


def kill_superlink(there: RunningFederation) -> None:
    """Kill the SuperLink, which comes back with its database."""
    os.kill(there.superlink().pid, signal.SIGKILL)


def kill_gate(there: RunningFederation) -> None:
    """Kill the gate."""
    os.kill(there.gate_process().pid, signal.SIGKILL)


def stop_node(client: int, seconds: float) -> Fault:
    """Stop a node and its SuperNode, and let them go on after `seconds`."""

    def strike(there: RunningFederation) -> None:
        node = there.nodes()[client].pid
        stopped = [node, *children(node)]
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    strike.__name__ = "stop node"
    return strike


@dataclass
class Sample:
    """What a federation holds at some time."""

    megabytes: dict[str, float]
    files: dict[str, int]

    @classmethod
    def of(cls, there: RunningFederation) -> Sample:
        """Measure the runner (this process), the SuperLink, the gate, and the mean node."""
        nodes = [[node.pid, *children(node.pid)] for node in there.nodes()]
        parts = {
            "runner": [[os.getpid()]],
            "superlink": [[there.superlink().pid]],
            "gate": [[there.gate_process().pid]],
            "node": nodes,
        }

        def mean(measure: Callable[[int], float], groups: list[list[int]]) -> float:
            return sum(measure(pid) for group in groups for pid in group) / len(groups)

        return cls(
            {name: round(mean(_megabytes, groups), 1) for name, groups in parts.items()},
            {name: round(mean(_open_files, groups)) for name, groups in parts.items()},
        )


@dataclass
class Report:
    """What a run under faults came to."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    """When each round was over (seconds since the start)."""
    struck: list[tuple[float, int, str]] = field(default_factory=list)
    """When, after which round, and what."""
    back: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until killed nodes were let in again, by the name of the fault."""
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    processes: list[str] = field(default_factory=list)
    """Left of it."""
    temporary: list[str] = field(default_factory=list)
    """Files left of it."""

    @property
    def unaccounted(self) -> list[int]:
        """Rounds in which answers and failures do not add up to the participants."""
        return [
            row["round"]
            for row in self.rounds
            if row["aggregated"] + sum(row["failures"].values()) != len(row["participants"])
        ]

    def recovery(self, after: int) -> float:
        """Seconds from the fault after round `after` to the next round with all participants,
        without one that was on its way."""
        (begun,) = [when for when, number, _ in self.struck if number == after]
        full = [
            self.seen[row["round"]]
            for row in self.rounds
            if row["round"] > after + 1 and row["aggregated"] == len(row["participants"])
        ]
        return full[0] - begun if full else float("inf")


def soak(
    written: Mapping[str, Any], out: Path, faults: Mapping[int, Fault], *, shared_seed: bool = True
) -> Report:
    """Run a scenario over a federation of this process; each fault strikes after its round.

    Args:
        written: The scenario.
        out: The folder to fill.
        faults: By round.
        shared_seed: Of the nodes.
    """
    report, mark = Report(), uuid.uuid4().hex
    os.environ[_MARK] = mark
    out.mkdir(parents=True, exist_ok=True)
    path = out / "soak.yaml"
    path.write_text(yaml.safe_dump(dict(written)))
    started = time.monotonic()
    nodes = written["data"]["clients"]
    over = threading.Event()
    with _own_temporary_folder() as temporary:
        with federation(out, nodes, paths=[], shared_seed=shared_seed) as there:
            given = (there, out, faults, report, started, over)
            thread = threading.Thread(target=_follow, args=given)
            thread.start()
            try:
                pipeline.run(path, out=out, link=there.link, workers=1)
            finally:
                over.set()
                thread.join()
        report.seconds = time.monotonic() - started
        report.rounds = _lines(out / "rounds.jsonl")
        report.processes = marked(mark)
        report.temporary = left_in(temporary)
    return report


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """Let this process and those that it starts use a temporary folder that nobody else uses."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def left_in(temporary: Path) -> list[str]:
    """What is left in a temporary folder, without the cache that torch keeps for its next start."""
    names = sorted(path.name for path in temporary.iterdir())
    return [name for name in names if not name.startswith("torchinductor")]


def _follow(
    there: RunningFederation,
    out: Path,
    faults: Mapping[int, Fault],
    report: Report,
    started: float,
    over: threading.Event,
) -> None:
    """Note when each round is over, and let faults strike."""
    while not over.wait(_POLL_SECONDS):
        for row in _lines(out / "rounds.jsonl")[len(report.seen) :]:
            number = row["round"]
            report.seen[number] = time.monotonic() - started
            if number % 10 == 1:
                with suppress(OSError):  # a process that is ending
                    report.samples.append(Sample.of(there))
            if strike := faults.get(number):
                report.struck.append((time.monotonic() - started, number, strike.__name__))
                threading.Thread(target=_strike, args=(strike, there, report), daemon=True).start()


def _strike(fault: Fault, there: RunningFederation, report: Report) -> None:
    seconds = fault(there)
    if seconds is not None:
        report.back.setdefault(fault.__name__, []).append(round(seconds, 1))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def marked(mark: str, variable: str = _MARK) -> list[str]:
    """The commands of other processes that run with this mark, once they had 5 s to end."""
    wanted = f"{variable}={mark}".encode()
    end = time.monotonic() + 5
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            if folder.name == str(os.getpid()):
                continue
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if "resource_tracker" in command and int(folder.name) in children(os.getpid()):
                    continue  # of Python's own: it ends with this process
                # A zombie has no command.
                if command and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"{folder.name} {command}")
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def _megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _schedule(rounds: int, every: int, nodes: int, timeout: float) -> dict[int, Fault]:
    """A fault every few rounds, all kinds in turn, the nodes in turn; the last rounds are quiet."""
    faults: dict[int, Fault] = {}
    for turn, number in enumerate(range(every, rounds - every, every)):
        client = turn % nodes
        kinds: list[Fault] = [
            kill_node(client),
            kill_superlink,
            kill_node(client, (client + 1) % nodes),
            kill_gate,
            stop_node(client, 1.5 * timeout),
        ]
        faults[number] = kinds[turn % len(kinds)]
    return faults


def main() -> None:
    """Soak a federation and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="rounds between two faults")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=15.0, help="of an answer, in seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    faults = _schedule(given.rounds, given.every, given.nodes, given.timeout)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        written = scenario(given.rounds, given.nodes, given.timeout)
        report = soak(written, given.out or Path(folder) / "out", faults)
    names = list(report.rounds[0]["failures"])
    failures = {name: sum(row["failures"][name] for row in report.rounds) for name in names}
    recoveries: dict[str, list[float]] = {}
    for _, number, name in report.struck:
        recoveries.setdefault(name, []).append(round(report.recovery(number), 1))
    first, last = report.samples[0], report.samples[-1]
    summary = {
        "rounds": len(report.rounds),
        "seconds": round(report.seconds),
        "answers": sum(row["aggregated"] for row in report.rounds),
        "asked": sum(len(row["participants"]) for row in report.rounds),
        "failures": failures,
        "unaccounted rounds": report.unaccounted,
        "seconds until let in again": report.back,
        "seconds to the next full round": recoveries,
        "megabytes, first": first.megabytes,
        "megabytes, last": last.megabytes,
        "open files, first": first.files,
        "open files, last": last.files,
        "processes left": report.processes,
        "temporary files left": report.temporary,
    }
    for name, value in summary.items():
        print(f"{name}: {value}")
    if given.json:
        given.json.write_text(json.dumps(summary, indent=1))
    sys.exit(bool(report.unaccounted or report.processes or report.temporary))


if __name__ == "__main__":
    main()
