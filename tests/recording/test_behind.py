"""Work behind its caller is done in order, within a bound, and before the interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsim.recording.behind import _WorkQueue


def test_work_is_done_in_the_order_in_which_it_came() -> None:
    done, behind = list[int](), _WorkQueue()
    for number in range(200):
        behind.later(lambda number=number: done.append(number))  # type: ignore[misc]
    behind.finish()
    assert done == list(range(200))


def test_a_caller_waits_while_more_than_the_bound_waits() -> None:
    behind, go, third = _WorkQueue(most_bytes=10), threading.Event(), threading.Event()
    behind.later(lambda: go.wait(20) and None, 6)
    behind.later(lambda: None, 4)

    def bring() -> None:
        behind.later(lambda: None, 1)
        third.set()

    thread = threading.Thread(target=bring)
    thread.start()
    assert not third.wait(0.3)
    go.set()
    assert third.wait(20)
    thread.join()
    behind.finish()


def test_work_larger_than_the_bound_is_done() -> None:
    done, behind = list[int](), _WorkQueue(most_bytes=10)
    behind.later(lambda: done.append(1), 1000)
    behind.finish()
    assert done == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_fails_holds_up_nothing() -> None:
    done, behind = list[int](), _WorkQueue(most_bytes=10)

    def fail() -> None:
        raise RuntimeError("broken")

    behind.later(fail, 10)
    behind.later(lambda: done.append(1), 10)
    behind.finish()
    assert done == [1]


def test_work_may_ask_for_its_end() -> None:
    done, behind, queued = list[int](), _WorkQueue(), threading.Event()

    def work() -> None:
        queued.wait(20)  # until it is among what `finish` waits for
        behind.finish(stalled=20)
        done.append(1)

    behind.later(work)
    queued.set()
    _within(behind.finish, 10)
    assert done == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_has_work_of_its_own(tmp_path: Path) -> None:
    program = f"""
import os, threading
from pathlib import Path
from fedsim.recording import behind
go = threading.Event()
behind.later(lambda: go.wait(100))
if (child := os.fork()) == 0:
    behind.later(Path({str(tmp_path)!r}, "child").touch)
    behind.finish(stalled=5)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go.set()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert (tmp_path / "child").exists()


def test_the_interpreter_ends_once_all_is_done(tmp_path: Path) -> None:
    """Also what comes from another thread when the first has ended."""
    program = f"""
import threading, time
from pathlib import Path
from typing import Any
from fedsim.recording import behind
def late():
    time.sleep(0.5)
    behind.later(lambda: Path({str(tmp_path)!r}, "late").touch())
threading.Thread(target=late).start()
behind.later(lambda: (time.sleep(0.3), Path({str(tmp_path)!r}, "one").touch()))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "late"}


def test_work_stays_in_order_while_the_interpreter_ends() -> None:
    program = """
import threading, time
from concurrent.futures import thread
from fedsim.recording import behind
def tell(number, seconds):
    behind.later(lambda: (time.sleep(seconds), print(number, flush=True)))
def late():
    while not thread._shutdown:
        time.sleep(0.01)
    tell(3, 0)
threading.Thread(target=late).start()
tell(1, 1)
tell(2, 0)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=100, capture_output=True, text=True
    )
    assert told.stdout.split() == ["1", "2", "3"]


def test_a_finalizer_may_come_in_the_middle_of_handing_work_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector runs where it likes: also between work's arrival and its thread's start."""
    done, behind = list[int](), _WorkQueue()
    start = threading.Thread.start

    def collected(self: Any) -> None:
        behind.finish()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", collected)
    _within(lambda: behind.later(lambda: done.append(1)))
    _within(behind.finish)
    assert done == [1]


def test_work_is_done_once_and_in_order_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, behind = list[int](), _WorkQueue()

    def refused(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for number in range(3):
            behind.later(lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == [0, 1, 2]
    behind.later(lambda: done.append(3))
    _within(behind.finish)
    assert done == [0, 1, 2, 3]


def test_a_wait_with_a_limit_ends_where_nothing_gets_done() -> None:
    behind, go = _WorkQueue(), threading.Event()

    def hang() -> None:
        go.wait(20)

    behind.later(hang)
    _within(lambda: behind.finish(stalled=0.1))
    go.set()
    behind.finish()


def _within(work: Callable[[], object], seconds: float = 2) -> None:
    """Does `work` in a thread; fails, and hangs not, where it does not end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()
