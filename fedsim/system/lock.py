"""Allows one run at a time in a folder, by a lock that the system lets go of as a process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsim.types import FedsimError

NAME = ".lock"
"""Name of the locked file in a run's folder, which is removed when the run ends."""
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe of this name is not waited for, and a link not followed."""
_NO_LOCK = "a link, a folder, a pipe or a device, and no lock"
_HELD = (errno.EAGAIN, errno.EACCES)
"""Errors of a lock that another process holds."""
_IMPOSSIBLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock_folder(folder: Path, option: str = "--out (in Python, out=...)") -> Iterator[None]:
    """Locks `folder` against other runs in a `with` block, and makes it if it is missing.

    The lock is a file `.lock` in it, which is removed in the end. A FedsimError says that this is
    no regular file, or that another run has the folder, and by which `option` a user chooses
    another. Without write access it is an OSError, and without locks of the file system a warning.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / NAME
    handle = _lock(path, option)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: nobody takes another's for it
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Returns whether a run has locked `folder`; False if it is missing or nothing can tell."""
    try:
        handle = os.open(folder / NAME, os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return False
        # Shared locks do not refuse each other; the exclusive one of a run refuses them.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of with the handle
    except OSError as error:
        return error.errno in _HELD
    finally:
        os.close(handle)
    return False


def _lock(path: Path, option: str) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise FedsimError(f"{path}: is {_NO_LOCK}; remove it") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FedsimError(f"{path}: is {_NO_LOCK}; remove it")
            _acquire(handle, path, option)
            # Its holder may have removed the file meanwhile: the lock would be on nothing.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder has removed it in the meantime


def _acquire(handle: int, path: Path, option: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            # The holder has written into the file who it is.
            holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
            raise FedsimError(
                f"{path.parent} is in use by another run ({holder or 'unknown'}): wait for its "
                f"end, or name another folder with {option}"
            ) from error
        if error.errno not in _IMPOSSIBLE:
            raise
        warnings.warn(
            f"{path.parent}: its file system knows no locks; see to it that no other run uses it",
            stacklevel=2,
        )
