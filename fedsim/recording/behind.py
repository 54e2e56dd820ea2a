"""Runs work behind its caller: one thread at a time, in order of arrival, bounded in memory.

The interpreter ends only once all of it is done; a kill loses what waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MOST_BYTES = 512 * 2**20
"""Maximum number of bytes that wait. A caller that brings more waits until there is room."""


class _WorkQueue:
    """A queue of work and the thread that does it; safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Starts no thread before there is work; at most `most_bytes` wait (see `later`)."""
        self._most = most_bytes
        self._bytes = 0
        """Number of bytes of all work that is not done."""
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        # Reentrant: a collected object's finalizer may come to `finish` from inside the lock.
        self._changed = threading.Condition(threading.RLock())
        self._working = False
        """Whether somebody works off what waits, or is about to."""
        self._thread = 0
        """Id of the thread that works or hands over, which `finish` must not hold up; else 0."""

    def later(self, job: Callable[[], None], size: int = 0) -> None:
        """Runs `job`, which holds `size` bytes and reports its own failures, in another thread."""
        with self._changed:
            while self._bytes and self._bytes + size > self._most:
                self._changed.wait()
            self._bytes += size
            self._waiting.append((job, size))
        self._start()

    def finish(self, stalled: float | None = None) -> None:
        """Waits until all jobs are done, or for `stalled` seconds without a finished job."""
        if threading.get_ident() == self._thread:
            return
        self._start()  # an interrupt may have kept a thread from being started
        with self._changed:
            while (self._waiting or self._working) and self._changed.wait(stalled):
                pass

    def _start(self) -> None:
        """Starts a thread that works off what waits, unless one works."""
        own = threading.get_ident()
        with self._changed:
            if self._working or not self._waiting:
                return
            self._working, self._thread = True, own
        try:
            # Not daemonic, whoever starts it: the interpreter ends only once it is done.
            threading.Thread(target=self._work_on, name="fedsim-recording", daemon=False).start()
        except RuntimeError:  # no thread is left, or the interpreter ends and takes nothing new
            self._work_on()
        except BaseException:  # Ctrl-C: what waits is done by the next who comes
            self._working = False
            raise
        finally:
            with self._changed:
                if self._thread == own:
                    self._thread = 0

    def _work_on(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._working, self._thread = False, 0
                    self._changed.notify_all()
                    return
                self._thread = threading.get_ident()
                job, size = self._waiting.popleft()
            try:
                with suppress(Exception):  # a job tells of its failures itself
                    job()
            except BaseException:  # Ctrl-C: what waits is done by the next who comes
                self._working, self._thread = False, 0
                raise
            finally:
                # Its bytes count until it is done, since the job holds them.
                with self._changed:
                    self._bytes -= size
                    self._changed.notify_all()


_behind = _WorkQueue()


def later(job: Callable[[], None], size: int = 0) -> None:
    """Runs `job` in another thread, after all earlier ones; an exception of it is dropped.

    It waits first while unfinished jobs hold over 512 MiB with the `size` bytes of this one.
    """
    _behind.later(job, size)


def finish(stalled: float | None = None) -> None:
    """Waits until all jobs are done, or none has ended for `stalled` seconds (None: no limit)."""
    _behind.finish(stalled)


def _forget() -> None:
    """Starts anew in a forked process, where the thread is missing and all work is the parent's."""
    global _behind
    _behind = _WorkQueue()


if hasattr(os, "register_at_fork"):
    # A child has the queue and no thread: `finish` would wait there for ever.
    os.register_at_fork(after_in_child=_forget)
