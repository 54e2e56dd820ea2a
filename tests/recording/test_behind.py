"""Work behind its caller is done in order, within a bound, and before the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedsim.recording.behind import Behind


def test_work_is_done_in_the_order_in_which_it_came() -> None:
    done, behind = list[int](), Behind()
    for number in range(200):
        behind.later(lambda number=number: done.append(number))  # type: ignore[misc]
    behind.finish()
    assert done == list(range(200))


def test_a_caller_waits_while_more_than_the_bound_waits() -> None:
    behind, go, third = Behind(most_bytes=10), threading.Event(), threading.Event()
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
    done, behind = list[int](), Behind(most_bytes=10)
    behind.later(lambda: done.append(1), 1000)
    behind.finish()
    assert done == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_fails_holds_up_nothing() -> None:
    done, behind = list[int](), Behind(most_bytes=10)

    def fail() -> None:
        raise RuntimeError("broken")

    behind.later(fail, 10)
    behind.later(lambda: done.append(1), 10)
    behind.finish()
    assert done == [1]


def test_work_may_ask_for_its_end() -> None:
    done, behind = list[int](), Behind()

    def work() -> None:
        behind.finish()
        done.append(1)

    behind.later(work)
    behind.finish()
    assert done == [1]


def test_the_interpreter_ends_once_all_is_done(tmp_path: Path) -> None:
    """Also what comes from another thread when the first has ended."""
    program = f"""
import threading, time
from pathlib import Path
from fedsim.recording import behind
def late():
    time.sleep(0.5)
    behind.later(lambda: Path({str(tmp_path)!r}, "late").touch())
threading.Thread(target=late).start()
behind.later(lambda: (time.sleep(0.3), Path({str(tmp_path)!r}, "one").touch()))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "late"}
