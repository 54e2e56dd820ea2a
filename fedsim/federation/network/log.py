"""A log of bounded size, whose writer hears of a full disk by an `OSError`.

Imports the standard library alone, as the gate does.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 8 * 2**20
"""Size at which a log begins anew; the full one stays beside it until the next time."""


def older(path: Path) -> Path:
    """Returns the path to which the full log at `path` is moved: `path` + .1."""
    return path.with_name(path.name + ".1")


class Log:
    """Appends text to a file, which together with its predecessor has at most 16 MiB."""

    def __init__(self, path: Path) -> None:
        """Continues the file at `path`, or begins it."""
        self._path = path
        self._file = path.open("ab")

    def write(self, text: str) -> None:
        """Appends `text` at once; an `OSError` if the disk is full."""
        content = text.encode()
        if self._file.tell() + len(content) > LOG_BYTES:
            self._file.close()
            # What was older still is lost: two files bound the whole.
            self._path.replace(older(self._path))
            self._file = self._path.open("ab")
        self._file.write(content)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def begin_anew(path: Path) -> None:
    """Empties the log at `path`, which another program appends to, if it is full.

    The first lines stay, as they say who the program is, such as a SuperNode's id. The full log is
    copied to `older(path)`. Lines that the program writes meanwhile are lost.
    """
    with suppress(OSError):  # a full disk: it is tried again
        if path.stat().st_size > LOG_BYTES:
            with path.open("rb") as file:
                first = file.read(LOG_BYTES // 1024)
            shutil.copyfile(path, older(path))
            # In place, since the other program holds the file open and appends to its end; cut
            # after a whole line.
            os.truncate(path, first.rfind(b"\n") + 1)
