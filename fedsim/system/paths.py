"""Paths as users write them, and the one way to the files that they name.

Everything that a user can name is opened here, or by a library after `regular` has looked at it:
a device would fill the memory, a pipe would wait for ever, and a file can be larger than what
reads it. `tests/system/test_paths.py` finds other ways in the source.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from fedsim.types import FedsimError

MIB, GIB = 1 << 20, 1 << 30
TEXT = 256 * MIB
"""Most bytes of a file of JSON that is read at once, and of a partition."""
LINES = 4 * GIB
"""Most bytes of a file of lines, and of a table."""
ARCHIVE = 1 << 40
"""Most bytes of a file whose parts are read one by one."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


def from_home(path: str) -> Path:
    """`path`, with the home directory for a leading `~` or `~user`.

    Raises:
        FedsimError: there is no such user, or the home directory is not known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FedsimError(
            f"{path}: the home directory of {Path(path).parts[0]} is not known; write the path in "
            "full"
        ) from error


def regular(path: Path, most: int) -> Path:
    """`path` itself, which a library may now open by name.

    Raises:
        FedsimError: it is no regular file, or has more than `most` bytes.
        OSError: it is missing, or may not be read.
    """
    with opened(path, most):
        return path


@contextmanager
def opened(path: Path, most: int) -> Iterator[BufferedReader]:
    """The regular file at `path`, opened for reading.

    Raises:
        FedsimError: as of `regular`.
        OSError: it is missing, or may not be read.
    """
    try:
        _check(path, path.stat(), most)
        # What was looked at may be gone by now: opening a pipe must not wait for its other end.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a NUL
        raise FedsimError(f"{str(path)!r} is no file name ({error}); check the path") from error
    with os.fdopen(handle, "rb") as file:
        _check(path, os.fstat(handle), most)
        yield file


def content(path: Path, most: int) -> bytes:
    """All bytes of the regular file at `path`.

    Raises:
        FedsimError: as of `regular`.
        OSError: it is missing, or may not be read.
    """
    with opened(path, most) as file:
        found = file.read(most + 1)
    if len(found) > most:  # it has grown meanwhile, or does not tell its size
        raise _too_large(path, len(found), most)
    return found


def text(path: Path, most: int, encoding: str = "utf-8") -> str:
    """The text of the regular file at `path`.

    Raises:
        FedsimError: as of `regular`.
        OSError: it is missing, or may not be read.
        UnicodeDecodeError: it has another encoding.
    """
    return content(path, most).decode(encoding)


def writable_folder(path: Path, option: str) -> None:
    """Refuse a folder to write to that is none, or that cannot be made.

    Raises:
        FedsimError: `path` or a part of it is a file, a link in a circle or to nowhere, or may not
            be written to; the message starts with `option`.
    """
    try:
        if "\0" in str(path):
            raise ValueError("a name with a NUL")
        for part in (path, *path.absolute().parents):
            if not part.exists():
                if part.is_symlink():
                    where = part.readlink()
                    raise FedsimError(
                        f"{option} {path}: {part} is a link to {where}, where nothing is; remove "
                        "the link or name another folder"
                    )
                continue
            if not part.is_dir():
                raise FedsimError(
                    f"{option} {path}: {part} is a file and no folder; name another folder"
                )
            if not os.access(part, os.W_OK | os.X_OK):
                raise FedsimError(
                    f"{option} {path}: {part} may not be written to; name another folder"
                )
            return
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise FedsimError(f"{option} {str(path)!r}: {cause}; name another folder") from error


def writable_file(path: Path, option: str) -> None:
    """Refuse a file to write that is a folder, or whose folder cannot be written to.

    Raises:
        FedsimError: as of `writable_folder`.
    """
    writable_folder(path.parent, option)
    if path.is_dir():
        raise FedsimError(f"{option} {path}: is a folder; name a file in it")


def _check(path: Path, found: os.stat_result, most: int) -> None:
    for is_kind, said in _KINDS:
        if is_kind(found.st_mode):
            raise FedsimError(f"{path} is {said}, and a regular file is wanted; check the path")
    if found.st_size > most:
        raise _too_large(path, found.st_size, most)


def _too_large(path: Path, size: int, most: int) -> FedsimError:
    return FedsimError(
        f"{path} has {_size(size)}, and at most {_size(most)} are read; make it smaller"
    )


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
