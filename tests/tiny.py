"""The smallest scenario of all rooms, so that a test writes only what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tiny_scenario(**changes: Any) -> dict[str, Any]:
    """Returns, as its YAML file has it: two clients' 8x8 digits, a small network, no attacks.

    `training__rounds=2` changes one entry; `training={...}` takes the place of the whole section.
    """
    written = {
        "name": "tiny",
        "data": {"source": {"name": "digits", "size": 8}, "clients": 2},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"rounds": 1, "local": {"batch_size": 4}},
        "attacks": [],
    }
    return change(written, changes)


def change(written: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sets entries of nested mappings in place: `a__b` is entry b of a."""
    for key, value in changes.items():
        *path, last = key.split("__")
        section = written
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return written
