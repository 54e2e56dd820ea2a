"""Ctrl-C, SIGTERM and SIGHUP: the command ends with status 130 and says how to go on.

The first of them raises `Interrupted`, so that what is under way can be put in order. A second
one ends the process at once, and so does a first one that was lost (in a callback that drops
exceptions) or that waits behind a long computation: a thread of its own sees to it. The process
then leaves behind what a kill leaves, from which `--resume` goes on.

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
"""How long putting things in order may take."""
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP.

    Where a KeyboardInterrupt itself leaves code that was given as text (as dataclasses make their
    methods), CPython remembers it as unhandled, and at the exit dies of SIGINT although it was
    caught. Of a subclass it does not.
    """


class _State:
    """What has become of this process's command."""

    received = False
    """Whether it was told to end."""
    ended = False
    """Whether its work is over, for whatever reason."""
    said = False
    """Whether it has said how to go on."""


_state = _State()


def how_to_go_on() -> str:
    """What to type to do the rest of the command that this process runs."""
    words = sys.argv[1:]
    again = shlex.join(["fedsim", *(word for word in words if word != "--resume")])
    if words[:1] == ["run"]:
        return f"continue with: {again} --resume"
    return f"run it again: {again}"


def say(write: Callable[[str], object]) -> None:
    """Let `write` tell people that the command was interrupted, and how to go on."""
    write(f"interrupted; {how_to_go_on()}")
    _state.said = True  # after it: twice is better than never


@contextmanager
def command() -> Iterator[None]:
    """The whole of a command: interrupted anywhere, it exits with status 130 and says how to go on.

    A signal that is ignored when the process starts (`nohup`, a script's background job) stays so.
    """
    _install()
    try:
        yield
    except BaseException:
        # Whatever it ends with is a consequence: a worker died of the same signal, an import broke.
        if not _state.received:
            raise
        _state.ended = True
        if not _state.said:
            say(lambda text: print(text, file=sys.stderr, flush=True))
        raise SystemExit(STATUS) from None
    finally:
        _state.ended = True


@contextmanager
def held() -> Iterator[None]:
    """Put interrupts off until the block is over; processes started within it never get any.

    So none is started by halves, and they leave it to this process to end them.
    """
    late: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda number, _: late.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for interrupt, handler in handlers.items():
            signal.signal(interrupt, handler)
    for first in late[:1]:
        handlers[signal.Signals(first)](first, None)


def _install() -> None:
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    # Python writes each signal's number there at once, even while the main thread computes.
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in heeded:
        signal.signal(number, _interrupt)
    threading.Thread(target=_watch, args=(told,), name="interrupts", daemon=True).start()
    atexit.register(_ignore, heeded)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _state.received and not _state.ended:
        _state.received = True
        raise Interrupted


def _watch(told: int) -> NoReturn:
    """End the process when it was told to twice, or does not end by itself."""
    _next(told)
    late = _state.ended and not _state.received
    if not late:
        select.select([told], [], [], _GRACE_SECONDS)
    if not _state.said:
        say(lambda text: os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{text}\n".encode()))
    os._exit(STATUS)


def _next(told: int) -> None:
    """Wait for the next of the signals that count: others have handlers of their own."""
    while os.read(told, 1)[0] not in SIGNALS:
        pass


def _ignore(numbers: list[signal.Signals]) -> None:
    """The status is decided; the interpreter would put the default, death by the signal, back."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
