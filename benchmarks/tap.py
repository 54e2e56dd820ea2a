"""What a tap adds to a round: rounds with it and without it in turns, in one run of a stock app.

    python benchmarks/tap.py --apps quickstart resnet --nodes 10 --pairs 12

A tapped round ends once all of it is written, so that what a thread writes beside the round is
counted, too. Three figures for each app, as shares of a round without the tap: what a round takes
longer, by the clock and in processor seconds of the process, with 95% intervals by a bootstrap over
pairs of neighboring rounds; and what of it the app waited for inside the tap's calls. The witness
works in all rounds alike. Also: memory that a tap holds after a round, which does not depend on how
many clients or rounds there were.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from stock_apps_runner import build, run

from fedsim.federation import tapping
from fedsim.recording import behind

Pair = tuple[float, float]
"""Seconds of a round with the tap, and of its neighbor without."""


class Rounds:
    """Times of the rounds of one run: by the clock, of the processor, and inside the tap."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, float]] = []
        self._inside = 0.0

    def mark(self) -> None:
        """Ends a round, with what is still to be written of it."""
        behind.finish()
        self.marks.append((time.perf_counter(), time.process_time(), self._inside))

    def beginning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, before which a round begins if its messages ask for training."""

        def marked(tape: Any, messages: Any) -> Any:
            if any(map(tapping.trains, messages)):
                self.mark()
            return function(tape, messages)

        return marked

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, timed as a part of the tap."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._inside += time.perf_counter() - started

        return timed

    def took(self) -> list[tuple[float, float, float]]:
        """Returns the three times of each round."""
        ends = zip(self.marks, self.marks[1:], strict=False)
        return [tuple(e - s for s, e in zip(start, end, strict=True)) for start, end in ends]  # type: ignore[misc]


def tapped_rounds(pairs: int) -> list[int]:
    """Returns which rounds are tapped: one of each pair from round 2 on, first and last in turn.

    >>> tapped_rounds(4)
    [2, 5, 6, 9]
    """
    return [2 + 2 * pair + pair % 2 for pair in range(pairs)]


def measure(name: str, nodes: int, pairs: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Returns clock seconds, processor seconds, and seconds inside the tap, of each pair."""
    rounds, chosen = Rounds(), frozenset(tapped_rounds(pairs))
    tape, tap = tapping._Tape, tapping.tap

    def tapped(target: Any, out: str) -> Any:
        return tap(target, out, rounds=chosen)

    with (
        patch("fedsim.tap", tapped),
        patch.object(tape, "begin", rounds.beginning(tape.begin)),
        patch.object(tape, "note", rounds.inside(tape.note)),
        patch.object(tape, "record", rounds.inside(tape.record)),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(sys.stderr),
    ):
        app = build(name, Path(folder) / name)
        run(name, app, nodes=nodes, num_server_rounds=1 + 2 * pairs)
        rounds.mark()
    took = rounds.took()
    assert len(took) == 1 + 2 * pairs
    together = [(took[with_tap - 1], took[(with_tap ^ 1) - 1]) for with_tap in sorted(chosen)]
    clock, processor, inside = (
        [(one[kind], other[kind]) for one, other in together] for kind in range(3)
    )
    waited = [(one, other[1]) for (one, _), other in zip(inside, clock, strict=True)]
    return clock, processor, waited


def more(pairs: Sequence[Pair]) -> float:
    """Returns what the first seconds are more than the second, as a share of these."""
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1


def interval(pairs: Sequence[Pair], resamples: int = 10_000) -> tuple[float, float]:
    """Returns the 95% interval of `more` by a bootstrap over the pairs."""
    draw = random.Random(0)  # noqa: S311 - no secret
    found = sorted(more(draw.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return found[resamples // 40], found[-resamples // 40]


def held(clients: int) -> int:
    """Returns the bytes that a tap holds after a round of so many clients, their answers gone."""
    arrays = ArrayRecord({"w": tapping.wire.encode({"w": _weights()})["w"]})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    with tempfile.TemporaryDirectory() as folder:
        tape = tapping._Tape(tapping._recorders(folder, None, None, 8.0)(1, "server"))
        gc.collect()
        tracemalloc.start()
        for node in range(clients):
            message = Message(content, node, "train")
            sent = tape.note(message, node)
            assert sent is not None
            tape.record(sent, str(node), message)
        behind.finish()
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return size


def _weights() -> Any:
    import torch

    return torch.zeros(250_000)


def main() -> None:
    """Prints the figures of each app."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--apps", nargs="+", default=["quickstart", "resnet"])
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=12)
    chosen = parser.parse_args()
    for name in chosen.apps:
        clock, processor, waited = measure(name, chosen.nodes, chosen.pairs)
        plain, busy = (sum(o for _, o in pairs) / len(pairs) for pairs in (clock, processor))
        print(f"{name}: a round without a tap takes {plain:.2f} s, {busy:.2f} s of a processor")
        for what, pairs in (("longer by the clock", clock), ("more processor time", processor)):
            low, high = interval(pairs)
            print(f"  {what}: {more(pairs):.1%} ({low:.1%} to {high:.1%})", flush=True)
        print(f"  waited for inside the tap: {more(waited) + 1:.2%}", flush=True)
    from fedsim.federation.local import identity

    with identity():
        for clients in (10, 100):
            print(f"held after {clients} clients of 1 MB each: {held(clients) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
