"""Progress where nobody watches a terminal: lines that say how far it is, and not too many."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedsim import progress
from fedsim.progress import Display


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_is_told_how_far_a_stage_is(clock: list[float]) -> None:
    file = io.StringIO()
    with Display(Console(file=file)) as live:
        live.stage("attacks", 3)
        live.advance("row 1")  # at once: no line of its own
        clock[0] += 31
        live.detail("row 2", "row 2, iteration 40 of 100")
        live.detail("row 2", "row 2, iteration 41 of 100")
        clock[0] += 31
        live.advance("row 2")
    assert file.getvalue().splitlines() == [
        "attacks: 3 of 3 to do",
        "attacks: 1 of 3 done; row 2, iteration 40 of 100",
        "attacks: 2 of 3 done; row 2",
    ]


def test_a_terminal_has_bars_and_no_such_lines(clock: list[float]) -> None:
    file = io.StringIO()
    with Display(Console(file=file, force_terminal=True)) as live:
        live.stage("attacks", 3)
        clock[0] += 31
        live.advance("row 1")
    assert "of 3 done" not in file.getvalue()
