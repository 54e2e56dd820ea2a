"""A node's own folder: its secret, its count of releases, and the truth and state of each run.

HOME/secret                        32 bytes that never leave the node
HOME/runs/<run>/scenarios/<stack>  a digest of what the run is of
HOME/runs/<run>/census             how many examples each client has in it
HOME/runs/<run>/data               a digest of the node's own
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from fedsim.recording.files import write_text
from fedsim.system import paths
from fedsim.types import FedsimError

_SECRET = "secret"  # noqa: S105 - the name of a file
_SECRET_BYTES = 32
_RUN = re.compile(r"[0-9a-f]{16,64}")


def run_folder(home: Path, run: str) -> Path:
    """Returns the folder in `home` of `run`, 16 to 64 hexadecimal digits; else a FedsimError."""
    if not _RUN.fullmatch(run):
        raise FedsimError(f"run: expected 16 to 64 hexadecimal digits, got {run[:40]!r}")
    return home / "runs" / run


def pin_run(home: Path, run: str, stack: str, fingerprint: str, held: str, data: str) -> None:
    """Notes, at the first call, what a `stack` of a `run` is; other values later are a FedsimError.

    Args:
        home: The node's own folder.
        run: Name of the run, 16 to 64 hexadecimal digits.
        stack: Name of the stack, which the caller has checked.
        fingerprint: Digest of all that decides the results of the stack's training.
        held: Number of examples of each client, as text.
        data: Digest of the node's examples.
    """
    pins = {
        Path("scenarios", stack): (fingerprint, "the run of another scenario"),
        Path("census"): (held, "a run of clients with other numbers of examples"),
        Path("data"): (data, "a run on other data of this node"),
    }
    pinned = {run_folder(home, run) / place: pin for place, pin in pins.items()}
    # All are checked before one is written, so that a refused run pins nothing.
    for path, (value, other) in pinned.items():
        if path.exists() and paths.text(path, paths.TEXT) != value:
            raise FedsimError(
                f"run {run}: this node knows it as {other}; resume that one, or start a new run, "
                "with another --out"
            )
    for path, (value, _) in pinned.items():
        if not path.exists():
            write_text(path, value)


def make_private(home: Path) -> None:
    """Makes the folder `home`, or closes a node's or an empty one to all but its owner.

    Any other folder that is open to other users is a FedsimError.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not home.stat().st_mode & 0o077:
        return
    try:
        # A folder of something else is not closed to its users: only a node's own, or an empty one.
        if not ((home / _SECRET).exists() or not any(home.iterdir())):
            raise PermissionError("it holds what no node has written")
        home.chmod(0o700)
    except OSError as error:
        raise FedsimError(
            f"--home: {home}: other users may look into it, and a node keeps private images there "
            f"({error.strerror or error}); chmod 700 {home}, or name a new folder"
        ) from error


def secret_seed(home: Path, run: str, use: str = "") -> int:
    """Returns a 256-bit seed of `run`, which follows from the secret in `home`.

    The secret is made if it is missing, and a FedsimError if it is damaged or open to others. `use`
    is any text that says what the seed is for: a seed for another use tells nothing of this one.
    """
    path = home / _SECRET
    if not path.exists():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
            # A secret lost in a power cut would come back as another, with other noise.
            file.flush()
            os.fsync(file.fileno())
    content = paths.content(path, paths.TEXT)
    if len(content) != _SECRET_BYTES:
        raise FedsimError(
            f"{path}: expected {_SECRET_BYTES} bytes, got {len(content)}: damaged; remove it, and "
            "begin new runs only"
        )
    if path.stat().st_mode & 0o077:
        raise FedsimError(f"{path}: others may read it; chmod 600 {path}")
    # A run's name is hexadecimal digits, so that no name contains the zero byte.
    named = f"{run}\0{use}" if use else run
    digest = hashlib.sha256(b"fedsim node\0" + content + named.encode()).digest()
    return int.from_bytes(digest, "big")
