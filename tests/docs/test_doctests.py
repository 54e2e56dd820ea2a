"""Every example in a docstring of fedsim, its attacks and its defenses prints what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"fedsim": "fedsim", "attacks": "fedsim_attacks", "defenses": "fedsim_defenses"}


def with_examples() -> list[str]:
    """The import names of the modules that have an example."""
    found = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                found.append(".".join([package, *(p for p in parts if p != "__init__")]))
    return found


MODULES = with_examples()


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried, f"{name}: its examples stand in no docstring"
    assert not failed, capsys.readouterr().out
