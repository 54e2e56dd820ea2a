"""Plugins of a test, found as if a package had registered them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import pytest

from fedsim.contracts import plugins


@contextmanager
def registered(members: Mapping[str, Mapping[str, type]]) -> Iterator[None]:
    """Register classes by group and name, as `{"attacks": {"dice": Dice}}`, within the block."""
    before = plugins._entry_points

    def with_own(group: str) -> dict[str, tuple[EntryPoint, ...]]:
        own = {
            name: (EntryPoint(name, f"{cls.__module__}:{cls.__qualname__}", group),)
            for name, cls in members.get(group.removeprefix("fedsim."), {}).items()
        }
        return {**before(group), **own}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_entry_points", with_own)
        yield
