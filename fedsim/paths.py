"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from fedsim.types import FedsimError


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
