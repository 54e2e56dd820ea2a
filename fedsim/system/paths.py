"""Opens the files that users name, and checks the paths that they write to.

A device would fill the memory, a pipe would wait for ever, and a file can be too large to read.
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
"""Maximum size in bytes of a JSON file that is read at once, or of a partition."""
LINES = 4 * GIB
"""Maximum size in bytes of a file of lines, or of a table."""
ARCHIVE = 1 << 40
"""Maximum size in bytes of a file whose parts are read one by one."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
)


def from_home(path: str) -> Path:
    """Returns `path` with a leading `~` or `~user` expanded; a FedsimError if no home is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FedsimError(
            f"{path}: the home directory of {Path(path).parts[0]} is not known; write the path in "
            "full"
        ) from error


def regular(path: Path, max_bytes: int) -> Path:
    """Returns `path` if it is a regular file of at most `max_bytes`.

    A FedsimError refuses any other file, an OSError one that is missing or may not be read.
    """
    with open_regular(path, max_bytes):
        return path


def refuse_links(path: Path, root: Path) -> Path:
    """Returns `path`; a FedsimError if it or a folder between it and `root` is a symbolic link."""
    for part in (path, *path.parents):
        if part == root:
            break
        if part.is_symlink():
            raise FedsimError(
                f"{part} is a link, and what lies in {root} itself is wanted; put the files there"
            )
    return path


def read_named(path: Path, option: str, max_bytes: int) -> bytes:
    """Returns all bytes of a file that a user named with a command's `option`.

    A FedsimError says that it cannot be read, is not a regular file or exceeds `max_bytes`.
    """
    try:
        return content(path, max_bytes)
    except OSError as error:
        raise FedsimError(f"{option}: {path}: {error.strerror}; check the path") from error


@contextmanager
def open_regular(path: Path, max_bytes: int) -> Iterator[BufferedReader]:
    """Opens the file at `path` in a `with` block, which gets it open for reading bytes.

    A FedsimError refuses what is no regular file or exceeds `max_bytes`, an OSError what is missing
    or may not be read.
    """
    try:
        _check(path, path.stat(), max_bytes)
        # What was looked at may be gone by now: opening a pipe must not wait for its other end.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:  # a NUL
        raise FedsimError(f"{str(path)!r} is no file name ({error}); check the path") from error
    with os.fdopen(handle, "rb") as file:
        _check(path, os.fstat(handle), max_bytes)
        yield file


def content(path: Path, max_bytes: int) -> bytes:
    """Returns all bytes of a regular file of at most `max_bytes`.

    A FedsimError refuses any other file, an OSError one that is missing or may not be read.
    """
    with open_regular(path, max_bytes) as file:
        # A read takes all the memory that it is allowed to fill, however small the file is.
        data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)
        while len(data) <= max_bytes and (more := file.read(MIB)):
            data += more  # it has grown meanwhile, or does not tell its size
    if len(data) > max_bytes:
        raise _too_large(path, len(data), max_bytes)
    return data


def text(path: Path, max_bytes: int, encoding: str = "utf-8") -> str:
    """Returns the text of a regular file of at most `max_bytes`.

    A FedsimError refuses any other file, an OSError one that is missing or may not be read, and a
    UnicodeDecodeError bytes that are not in `encoding`.
    """
    return content(path, max_bytes).decode(encoding)


def writable_folder(path: Path, option: str) -> None:
    """Raises a FedsimError, with `option` in it, if `path` can be no writable folder.

    The folder need not exist, and is not made.
    """
    try:
        if "\0" in str(path):
            raise ValueError("a name with a NUL")
        # The nearest part that exists decides: the rest can be made in it.
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
    """Raises a FedsimError, with `option` in it, if `path` is a folder or its folder unwritable.

    Whether a file that is there already may be overwritten is not checked.
    """
    writable_folder(path.parent, option)
    if path.is_dir():
        raise FedsimError(f"{option} {path}: is a folder; name a file in it")


def _check(path: Path, status: os.stat_result, max_bytes: int) -> None:
    for is_kind, kind in _KINDS:
        if is_kind(status.st_mode):
            raise FedsimError(f"{path} is {kind}, and a regular file is wanted; check the path")
    if status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)


def _too_large(path: Path, size: int, max_bytes: int) -> FedsimError:
    return FedsimError(
        f"{path} has {_size(size)}, and at most {_size(max_bytes)} are read; make it smaller"
    )


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
