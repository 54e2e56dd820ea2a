"""Runs worker processes, and keeps a temporary folder, that end with their parent, however it ends.

Imports the standard library alone: a worker is bound to its parent before slow imports.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from fedsim.system import interrupts

_PR_SET_PDEATHSIG = 1


@dataclass
class _Context:
    news: Queue[Any]
    shared: bytes


_context: _Context | None = None


class _Process(SpawnProcess):
    """A worker without its parent's arguments, which name files, and without its script."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing calls it so
        # What a spawned process is told follows from `sys.argv` and `__main__` while it is started.
        arguments, main = sys.argv, sys.modules["__main__"]
        sys.argv, sys.modules["__main__"] = [""], types.ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.argv, sys.modules["__main__"] = arguments, main


class _SpawnContext(SpawnContext):
    Process = _Process


@contextmanager
def pool(workers: int, shared: object) -> Iterator[tuple[ProcessPoolExecutor, Queue[Any]]]:
    """Starts `workers` processes for a `with` block, which gets (their executor, a queue).

    Each worker has a copy of `shared` (`get_shared`), which must be picklable. What a worker passes
    to `tell` comes out of the queue. Work must be submitted within `interrupts.delay_interrupts`,
    since submitting starts workers. The end of the block waits for work that runs, and cancels the
    rest. An exception in the block, or the end of this process, ends the workers in the middle of
    their work.
    """
    context = _SpawnContext()
    news: Queue[Any] = context.Queue()
    end, lifeline = context.Pipe(duplex=False)
    with end, lifeline:
        executor = ProcessPoolExecutor(workers, context, _start, (end, news, pickle.dumps(shared)))
        try:
            yield executor, news
        except BaseException:
            lifeline.close()
            raise
        finally:
            executor.shutdown(cancel_futures=True)


def tell(message: Any) -> None:
    """Puts a picklable `message` into the queue of this worker's `pool`.

    Outside of a worker it is an AssertionError.
    """
    assert _context is not None
    _context.news.put(message)


def get_shared() -> Any:
    """Returns a new copy of the `shared` of this worker's `pool`; elsewhere an AssertionError."""
    assert _context is not None
    return pickle.loads(_context.shared)  # noqa: S301 - this process's parent wrote it


def _start(end: Connection, news: Queue[Any], shared: bytes) -> None:
    global _context
    _context = _Context(news, shared)
    if sys.platform == "linux":  # even while a library computes and lets no thread of Python run
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow, args=(end,), daemon=True).start()


def _follow(end: Connection) -> None:
    """Ends this process when its parent closes the other end, as its death does."""
    try:
        end.poll(None)
    finally:
        os._exit(interrupts.STATUS)


_SWEEP = """\
import pathlib, shutil, sys, time
folder = pathlib.Path(sys.argv[1])
sys.stdin.buffer.read()
for _ in range(50):
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        break
    time.sleep(0.2)
"""
"""Program that waits until its input, or its parent, ends, and then removes the folder."""


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """Makes a temporary folder, which only its owner may enter, and gives a `with` block its path.

    Its name begins with `prefix`. It is removed as the block or this process ends.
    """
    with interrupts.delay_interrupts():
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        sweeper = subprocess.Popen(  # noqa: S603 - this very Python
            [sys.executable, "-I", "-S", "-c", _SWEEP, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A signal to the terminal's whole group must not end the sweeper, too.
            start_new_session=True,
            cwd="/",
        )
    try:
        yield folder
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()
