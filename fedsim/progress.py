"""The live display: rounds first, then attacks with their loss; how far, and how long to go."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Display(Protocol):
    """What the pipeline tells while it works."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """A stage of `total` steps begins, of which `done` were finished before (a resumed run)."""

    def advance(self, detail: str) -> None:
        """A step of the current stage has finished."""

    def detail(self, key: str, text: str) -> None:
        """What is going on inside a step; `key` tells concurrent ones apart."""

    def note(self, text: str) -> None:
        """A line that stays: which variant of a sweep is at work, and where."""


class Quiet:
    """Tells nothing."""

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """See `Display`."""

    def advance(self, detail: str) -> None:
        """See `Display`."""

    def detail(self, key: str, text: str) -> None:
        """See `Display`."""

    def note(self, text: str) -> None:
        """See `Display`."""


class Live:
    """Bars on a terminal; one line a stage and note where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._running: dict[str, str] = {}

    def __enter__(self) -> Live:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """See `Display`."""
        self._running.clear()
        self._task = self._bars.add_task(title, total=total, completed=done, detail="")
        if not self._console.is_terminal:
            self.note(f"{title}: {total - done} of {total} to do")

    def advance(self, detail: str) -> None:
        """See `Display`."""
        if self._task is not None:
            self._bars.update(self._task, advance=1, detail=detail)

    def detail(self, key: str, text: str) -> None:
        """See `Display`."""
        self._running.pop(key, None)
        self._running[key] = text
        while len(self._running) > 2:
            del self._running[next(iter(self._running))]
        if self._task is not None:
            self._bars.update(self._task, detail=" · ".join(self._running.values()))

    def note(self, text: str) -> None:
        """See `Display`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


_PATIENCE, _EVERY = 1.0, 5.0
"""Seconds of silence before work is told of, and between two lines about it."""


@contextmanager
def told_of_work(title: str, stream: TextIO | None = None) -> Iterator[None]:
    """Print how far an accountant is, on standard error, where it takes more than a second."""
    from fedsim.privacy.numerics import work

    started = last = time.monotonic()

    def listen(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - started > _PATIENCE and now - max(last, started + _PATIENCE - _EVERY) >= _EVERY:
            last = now
            print(f"{title}: {done / max(total, 1):.0%} of a curve", file=stream or sys.stderr)

    with work.heard_by(listen):
        yield
