"""Errors that start with the key of the scenario that is to blame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedsim.types import FedsimError


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Let a FedsimError from inside start with the scenario's key that is to blame."""
    try:
        yield
    except FedsimError as error:
        raise FedsimError(f"{key}: {error}") from error
