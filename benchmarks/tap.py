"""Share of a round's time that a tap takes, and that a witness takes, in one and the same run.

    python benchmarks/tap.py --apps quickstart resnet --nodes 10

The time inside the recording is set against the rounds' time without it, so that other work on the
machine slows both. Also: memory that a tap holds after a round, which does not depend on how many
clients or rounds there were.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from stock_apps_runner import build, run

from fedsim.federation import tapping, witness
from fedsim.federation.local import LocalGrid


class Stopwatch:
    """Seconds spent in functions that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def shares(name: str, nodes: int, rounds: int) -> tuple[float, float, float]:
    """Returns seconds of the rounds without recording, of the tap, and of the witness's writing."""
    whole, tap, kept = Stopwatch(), Stopwatch(), Stopwatch()
    places: list[tuple[Any, str, Stopwatch]] = [
        (LocalGrid, "send_and_receive", whole),
        (tapping._Tape, "note", tap),
        (tapping._Tape, "record", tap),
        (witness, "_keep", kept),
    ]
    before = [getattr(place, function) for place, function, _ in places]
    for place, function, watch in places:
        setattr(place, function, watch.around(getattr(place, function)))
    try:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            app = build(name, Path(folder) / name)
            run(name, app, nodes=nodes, num_server_rounds=rounds)
    finally:
        for (place, function, _), original in zip(places, before, strict=True):
            setattr(place, function, original)
    return whole.seconds - kept.seconds, tap.seconds, kept.seconds


def held(clients: int) -> int:
    """Returns the bytes that a tap holds after a round of so many clients, their answers gone."""
    arrays = ArrayRecord({"w": tapping.wire.encode({"w": _weights()})["w"]})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    with tempfile.TemporaryDirectory() as folder:
        tape = tapping._Tape(tapping._Plan.of(folder, None, None, 8.0).recorder(1, "server"))
        gc.collect()
        tracemalloc.start()
        for node in range(clients):
            message = Message(content, node, "train")
            sent = tape.note(message, node)
            assert sent is not None
            tape.record(sent, str(node), message)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return size


def _weights() -> Any:
    import torch

    return torch.zeros(250_000)


def main() -> None:
    """Prints a line for each app."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--apps", nargs="+", default=["quickstart", "resnet"])
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    for name in chosen.apps:
        rounds, tap, kept = shares(name, chosen.nodes, chosen.rounds)
        print(
            f"{name}: rounds {rounds:.2f} s, tap {tap:.3f} s ({tap / rounds:.1%}), "
            f"witness's files {kept:.3f} s ({kept / rounds:.1%})",
            flush=True,
        )
    from fedsim.federation.local import identity

    with identity():
        for clients in (10, 100):
            print(f"held after {clients} clients of 1 MB each: {held(clients) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
