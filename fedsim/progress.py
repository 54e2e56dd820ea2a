"""Displays progress of rounds and attacks: the share done, the time left, and losses."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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


class Display:
    """Shows progress on `console` (None: nowhere) within its `with` block.

    A terminal gets bars, anything else plain lines: as a stage begins, then at most every 30 s.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(quiet=True)
        self._title, self._done, self._total, self._told = "", 0, 0, 0.0
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=self._console,
            # A bar redraws its line, and would fill a file with copies of itself.
            disable=self._console.quiet or not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._running: dict[str, str] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, title: str, total: int, done: int = 0) -> None:
        """Begins a stage called `title` of `total` steps, `done` of which are done already."""
        self._running.clear()
        self._task = self._bars.add_task(title, total=total, completed=done, detail="")
        self._title, self._done, self._total = title, done, total
        if not self._console.is_terminal:
            self._told = time.monotonic()
            self.note(f"{title}: {total - done} of {total} to do")

    def advance(self, detail: str) -> None:
        """Counts one more step of the stage as done, and shows `detail` beside the bar."""
        if self._task is not None:
            self._bars.update(self._task, advance=1, detail=detail)
        self._done += 1
        self._tell(detail)

    def detail(self, key: str, text: str) -> None:
        """Shows `text` of the running step `key`; the last two steps that reported are shown."""
        # Taken out and put in again, it stands last.
        self._running.pop(key, None)
        self._running[key] = text
        while len(self._running) > 2:
            del self._running[next(iter(self._running))]
        if self._task is not None:
            self._bars.update(self._task, detail=" · ".join(self._running.values()))
        self._tell(text)

    def note(self, text: str) -> None:
        """Writes `text` at once as a line of its own, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tell(self, detail: str) -> None:
        """Writes how far the stage is, where there is no bar and it has been silent for long."""
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= _SILENCE:
            self._told = now
            self.note(f"{self._title}: {self._done} of {self._total} done; {detail}")


_SILENCE = 30.0
"""Least seconds between two lines about a stage, where the output is no terminal."""
_PATIENCE, _EVERY = 1.0, 5.0
"""Seconds before the first line of `report_work`, and least seconds between two lines."""


def display(quiet: bool) -> Display:
    """Returns a `Display` on the standard error; it shows nothing if `quiet`."""
    return Display(Console(stderr=True, quiet=quiet))


@contextmanager
def report_work(title: str, of: str = "a curve", quiet: bool = False) -> Iterator[None]:
    """Prints how much of a privacy computation inside its `with` block is done.

    Lines such as `TITLE: 40% of a curve` go to the standard error, the first after one second and
    others at least 5 s later. `of` names the work in them. Only work that tells
    `fedsim.privacy.numerics.work` counts. `quiet` prints nothing.
    """
    from fedsim.privacy.numerics import work

    if quiet:
        yield
        return
    started = last = time.monotonic()

    def listen(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        # The first line comes after _PATIENCE, each other one _EVERY after the last.
        if now - started > _PATIENCE and now - max(last, started + _PATIENCE - _EVERY) >= _EVERY:
            last = now
            print(f"{title}: {done / max(total, 1):.0%} of {of}", file=sys.stderr)

    with work.heard_by(listen):
        yield
