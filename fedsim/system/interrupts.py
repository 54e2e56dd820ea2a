"""Ctrl-C, SIGTERM and SIGHUP: the command ends with status 130 and says how to go on.

Imports the standard library alone, since interrupts come early, too.
"""

from __future__ import annotations

import atexit
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STATUS = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 20.0
"""Seconds for which a command may clean up before it is ended."""
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by the first Ctrl-C, SIGTERM or SIGHUP inside `command`.

    Python would end by SIGINT after some plain KeyboardInterrupts, even if they were caught.
    """


class _State:
    received = False
    ended = False
    """Whether the command's work is over, for whatever reason."""
    reported = False


_state = _State()


def how_to_go_on() -> str:
    """Returns a line, no newline, with the command that does the rest of this one (`sys.argv`)."""
    words = sys.argv[1:]
    text = shlex.join(["fedsim", *(word for word in words if word != "--resume")])
    if words[:1] in (["run"], ["up"]):
        return f"continue with: {text} --resume"
    return f"run it again: {text}"


def say(write: Callable[[str], object]) -> None:
    """Calls `write` with a line, no newline, on how to go on; `command` then writes none."""
    write(f"interrupted; {how_to_go_on()}")
    _state.reported = True  # after it: twice is better than never


@contextmanager
def command() -> Iterator[None]:
    """Runs a whole command in a `with` block, once a process and in its main thread.

    The first Ctrl-C, SIGTERM or SIGHUP raises `Interrupted` in it, unless that signal was ignored.
    Whatever exception then ends the block becomes a SystemExit of status 130, and stderr says how
    to go on, unless `say` has. A second signal, or 20 seconds without an end, ends the process with
    that status.
    """
    _install()
    try:
        yield
    except BaseException:
        # Whatever it ends with is a consequence: a worker died of the same signal, an import broke.
        if not _state.received:
            raise
        _state.ended = True
        if not _state.reported:
            say(lambda text: print(text, file=sys.stderr, flush=True))
        raise SystemExit(STATUS) from None
    finally:
        _state.ended = True


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Holds interrupts back until a `with` block is over, if the main thread runs it.

    Processes that its thread starts in the block never get any.
    """
    pending: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, _: pending.append(number))
    # A child inherits the mask, which is why it never gets any of these.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for interrupt, handler in handlers.items():
            signal.signal(interrupt, handler)
    # One is enough: its handler raises.
    for first in pending[:1]:
        handlers[signal.Signals(first)](first, None)


def _install() -> None:
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    reader, writer = os.pipe()
    # `set_wakeup_fd` takes no descriptor that may block.
    os.set_blocking(writer, False)
    # Python writes each signal's number there at once, even while the main thread computes.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, _interrupt)
    threading.Thread(target=_watch, args=(reader,), name="interrupts", daemon=True).start()
    atexit.register(_ignore, handled)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _state.received and not _state.ended:
        _state.received = True
        raise Interrupted


def _watch(reader: int) -> NoReturn:
    """Ends the process at a second signal, or when it does not end by itself."""
    while os.read(reader, 1)[0] not in SIGNALS:
        pass  # others have handlers of their own
    # A signal behind the end of the work has nothing to clean up, and waits for nothing.
    is_late = _state.ended and not _state.received
    if not is_late:
        select.select([reader], [], [], _GRACE_SECONDS)
    if not _state.reported:
        say(lambda text: os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{text}\n".encode()))
    # In a thread `sys.exit` would end that thread alone.
    os._exit(STATUS)


def _ignore(numbers: list[signal.Signals]) -> None:
    # The default, death by the signal, would change the status of the exit.
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
