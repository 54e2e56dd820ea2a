"""The work of an accountant: an upper limit that is stated before it starts, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedsim.types import FedsimError

Listener = Callable[[int, int], None]
"""A function that is told how many numbers have been computed, and of how many."""

MOST = 100_000_000_000
"""Numbers that one answer may take: about ten minutes on one core."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class TooMuchWork(FedsimError):  # noqa: N818 - reads as what happened
    """Raised where an answer would compute more numbers than it may."""


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Reports all work in the `with` block to `listener`, which is called with (done, total)."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(done: int, total: int) -> None:
    """Reports that `done` of `total` numbers are computed, if `heard_by` has set a listener."""
    if listener := _listener.get():
        listener(done, total)


@contextmanager
def part(number: int, total: int) -> Iterator[None]:
    """Reports all work in the `with` block as part `number`, from 0, of `total` equal parts.

    The farthest of several works is reported, so that progress never goes back.
    """
    outer, farthest = _listener.get(), 0.0

    def inner(done: int, of: int) -> None:
        nonlocal farthest
        assert outer is not None
        farthest = max(farthest, done / of)
        outer(round((number + farthest) * _STEPS), total * _STEPS)

    if outer is None:
        yield
        return
    with heard_by(inner):
        # Reported at once: a part may compute for long before it says anything.
        inner(0, 1)
        yield


_STEPS = 1000
"""Steps in which the progress of one part is reported."""
