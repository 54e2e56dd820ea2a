"""Flower's SuperLink and SuperNode as child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fedsim.types import FedsimError

# Constant of Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_START_SECONDS = 60.0
_STOP_SECONDS = 8.0
_POLL_SECONDS = 0.05
_TAIL = 800
# Size at which a log begins anew, and of its first lines, which say who the program is.
_LOG_BYTES, _FIRST_BYTES = 8 * 2**20, 8 * 2**10


def free_port() -> int:
    """Returns a port of loopback, above 0, at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(name: str) -> str:
    """Returns the path of the program `name` beside this Python; a FedsimError if not there."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FedsimError(f"{name} is not installed beside {sys.executable}; pip install fedsim")
    return str(path)


class Child:
    """A program that runs until it ends or is stopped; its output is appended to a file."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Starts `command`, its output appended to `log`; on Linux it ends with this thread.

        An OSError says that it cannot be started.
        """
        self.command, self._log = list(command), log
        parent = os.getpid()
        with log.open("ab") as file:
            # The log is appended to: this program's own words begin here.
            self._begin = file.tell()
            self._process = subprocess.Popen(  # noqa: S603 - programs installed beside Python
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Leads a process group of its own, which `stop` can kill as a whole.
                start_new_session=True,
                env={**os.environ, "FLWR_LOG_LEVEL": "INFO"},
                preexec_fn=partial(_end_with, parent) if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        """Id of the program's process."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status of the program; None while it runs, and -N if signal N ended it."""
        return self._process.poll()

    def words(self) -> str:
        """Returns everything that the program has written, but for what `bound_log` has removed."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def last_words(self) -> str:
        """Returns the last 800 characters that the program has written, or the word `nothing`."""
        return self.words()[-_TAIL:].strip() or "nothing"

    def bound_log(self) -> None:
        """Cuts the file of the program's output to its first 8 KiB of lines if it exceeds 8 MiB.

        The full one is copied to a file beside it, whose name ends in .1. Lines that the program
        writes meanwhile are lost.
        """
        with suppress(OSError):  # a full disk: it is tried again
            if self._log.stat().st_size > _LOG_BYTES:
                with self._log.open("rb") as file:
                    first = file.read(_FIRST_BYTES)
                shutil.copyfile(self._log, f"{self._log}.1")
                # In place, since the program holds the file open and appends to its end; cut after
                # a whole line.
                os.truncate(self._log, first.rfind(b"\n") + 1)
        self._begin = min(self._begin, self._log.stat().st_size)

    def await_port(self, port: int) -> None:
        """Waits up to a minute for the program to listen on loopback `port`; else FedsimError."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self.status is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            time.sleep(_POLL_SECONDS)
        name = Path(self.command[0]).name
        raise FedsimError(f"{name} does not start; its last words: {self.last_words()}")

    def await_words(self, words: str, who: str) -> None:
        """Waits up to two minutes for the program to say `words`; else a FedsimError with `who`."""
        end = time.monotonic() + 2 * _START_SECONDS
        while words not in self.words():
            if self.status is not None or time.monotonic() > end:
                raise FedsimError(f"{who} does not start; its last words: {self.last_words()}")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends the program by SIGTERM or, after 8 seconds, by SIGKILL; then its process group."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)  # first alone, so that it ends its own
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def superlink(folder: Path, port: int, log: Path) -> Child:
    """Starts a SuperLink on `port` of loopback; its output goes to the file `log`.

    It speaks TLS and lets in nodes with registered keys alone. `folder` holds its database,
    `superexec.secret`, and the certificates of `keys.make_keys`. The call returns before it
    listens: `Child.await_port` waits for that. A FedsimError says that Flower is not installed.
    """
    return Child(
        [
            program("flower-superlink"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--ssl-ca-certfile", str(folder / "ca.crt")),
            *("--ssl-certfile", str(folder / "server.crt")),
            *("--ssl-keyfile", str(folder / "server.key")),
            *("--database", str(folder / "superlink.db")),
            *("--superexec-auth-secret-file", str(folder / "superexec.secret")),
            "--enable-supernode-auth",
            *("--isolation", "process"),
            "--disable-runtime-dependency-installation",
        ],
        log,
    )


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A parent that died before `prctl` sends no signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
