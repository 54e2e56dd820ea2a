"""Writes large files past the page cache, where the system can: a tenth of the processor's time."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_BLOCK = 4096
"""Size in bytes of a block, of which a direct write is a multiple in memory and file."""
_BUFFER = 256 * _BLOCK
"""Number of bytes that are written at a time."""


def write(handle: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes `pieces` to the empty file whose descriptor is `handle`, which stays open."""
    _ask_for(handle, directly=True)
    buffer = memoryview(mmap.mmap(-1, _BUFFER))  # begins at a page
    used = size = 0
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        size += len(rest)
        while rest:
            part = rest[: _BUFFER - used]
            buffer[used : used + len(part)] = part
            used += len(part)
            rest = rest[len(part) :]
            if used == _BUFFER:
                _write_all(handle, buffer)
                used = 0
    if used:
        # Padded to a whole block, as direct writing asks; the file is cut to its size below.
        _write_all(handle, buffer[: used + -used % _BLOCK])
    os.ftruncate(handle, size)


def _write_all(handle: int, rest: memoryview) -> None:
    while rest:
        try:
            written = os.write(handle, rest)
        except OSError as error:
            # A file system may refuse only now, or behind a write that it cut short.
            if error.errno != errno.EINVAL or not _ask_for(handle, directly=False):
                raise
            continue
        rest = rest[written:]


def _ask_for(handle: int, *, directly: bool) -> bool:
    """Switches direct writing on or off; returns whether anything has changed."""
    flag = getattr(os, "O_DIRECT", 0)
    if fcntl is None or not flag:
        return False
    before = fcntl.fcntl(handle, fcntl.F_GETFL)
    wanted = before | flag if directly else before & ~flag
    if wanted == before:
        return False
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, wanted)
    except OSError:  # not on this file system
        return False
    return True
