"""A clock that stands still until a test lets time pass: no busy machine makes anybody late."""

from __future__ import annotations

import pytest

from fedsim.federation import delivery, local


class Clock:
    """What the grid and the server take for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def stopped(patch: pytest.MonkeyPatch) -> Clock:
    """Make messages travel by a clock that only the test moves."""
    clock = Clock()
    for module in (delivery, local):
        patch.setattr(module, "time", clock)
    return clock
