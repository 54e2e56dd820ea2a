"""Runs work behind its caller: one thread, in the order in which it came, bounded in memory.

For what an app's round need not wait for. The interpreter ends only once all of it is done; a kill
loses what waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MOST_BYTES = 512 * 2**20
"""Bytes that may wait. A caller that brings more waits until there is room."""


class Behind:
    """A queue of work and the thread that does it; safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Starts no thread before there is work."""
        self._most = most_bytes
        self._bytes = 0
        self._jobs = 0
        # Reentrant: a collected object's finalizer may come to `finish` from inside the lock.
        self._changed = threading.Condition(threading.RLock())
        self._worker: ThreadPoolExecutor | None = None
        self._thread = 0

    def later(self, job: Callable[[], None], size: int = 0) -> None:
        """Runs `job` after those that came before, and returns at once if there is room.

        Args:
            job: What it raises is lost: it has to tell of its failures itself.
            size: Bytes that are held until it is done. One job may be larger than the bound, and
                then waits alone.
        """
        with self._changed:
            while self._bytes and self._bytes + size > self._most:
                self._changed.wait()
            self._bytes += size
            self._jobs += 1
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "fedsim-recording", self._begin)
            try:
                self._worker.submit(self._run, job, size)
                return
            except RuntimeError:  # the interpreter ends, and its threads take nothing new
                self._changed.wait_for(lambda: self._jobs == 1)
        self._run(job, size)

    def finish(self) -> None:
        """Waits until all work is done; returns at once where the work itself asks."""
        if threading.get_ident() == self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    def _run(self, job: Callable[[], None], size: int) -> None:
        try:
            job()
        finally:
            with self._changed:
                self._bytes -= size
                self._jobs -= 1
                self._changed.notify_all()


_behind = Behind()


def later(job: Callable[[], None], size: int = 0) -> None:
    """Runs `job` behind the caller, see `Behind.later`; the bound is that of the whole process."""
    _behind.later(job, size)


def finish() -> None:
    """Waits until all that this process put off is done."""
    _behind.finish()


def _forget() -> None:
    """In a forked process the thread is missing, and what waits is the parent's."""
    global _behind
    _behind = Behind()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
