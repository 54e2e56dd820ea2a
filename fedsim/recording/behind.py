"""Runs work behind its caller: one thread at a time, in order of arrival, bounded in memory.

The interpreter ends only once all of it is done; a kill loses what waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

MOST_BYTES = 512 * 2**20
"""Maximum number of bytes that wait. A caller that brings more waits until there is room."""


class _WorkQueue:
    """A thread that works off what comes; safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._thread = 0
        """Id of the thread that works, once it has started."""
        # Not daemonic: the interpreter ends only once the thread has done all its work.
        self._executor = ThreadPoolExecutor(1, "fedsim-recording", initializer=self._begin)
        self._arriving = threading.Lock()
        self._waiting: dict[Future[None], int] = {}
        """Work that is not done -> its bytes, which count until then, since the work holds them."""

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    def later(self, job: Callable[[], None], size: int = 0) -> None:
        jobs = [job]

        def work() -> None:
            with suppress(Exception):  # a job tells of its failures itself
                while jobs:
                    jobs.pop()()

        with self._arriving:
            while (held := sum(list(self._waiting.values()))) and held + size > self._most:
                wait(list(self._waiting), return_when=FIRST_COMPLETED)
            try:
                future = self._executor.submit(work)
            except RuntimeError:  # no thread is left, or the interpreter ends and takes nothing new
                self.finish()  # a thread there is still does what came before
                work()  # if a thread gets it later, too, there is nothing left to do
                return
            self._waiting[future] = size
            future.add_done_callback(self._waiting.pop)

    def finish(self, stalled: float | None = None) -> None:
        # The thread itself must not be held up, where a job or a finalizer asks for its end.
        if threading.get_ident() == self._thread:
            return
        until = ALL_COMPLETED if stalled is None else FIRST_COMPLETED
        while waiting := list(self._waiting):
            if not wait(waiting, stalled, until).done:
                return


_behind = _WorkQueue()


def later(job: Callable[[], None], size: int = 0) -> None:
    """Runs `job` in another thread, after all earlier ones; an exception of it is dropped.

    It waits first while unfinished jobs hold over 512 MiB with the `size` bytes of this one. If no
    thread can be started, `job` runs in the caller's.
    """
    _behind.later(job, size)


def finish(stalled: float | None = None) -> None:
    """Waits until `later`'s jobs are done, or none ended for `stalled` seconds (None: no limit).

    Called by such a job, it returns at once.
    """
    _behind.finish(stalled)


def _forget() -> None:
    """Starts anew in a forked process, where the thread is missing and all work is the parent's."""
    global _behind
    _behind = _WorkQueue()


if hasattr(os, "register_at_fork"):
    # A child has the queue and no thread: `finish` would wait there for ever.
    os.register_at_fork(after_in_child=_forget)
