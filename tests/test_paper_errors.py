"""The table of the papers' errors names tests that exist, and all those that it should."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", (ROOT / "docs/paper-errors.md").read_text())


def listed(path: str) -> set[str]:
    """`name` or `Class::name` of every test in a file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return found


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 30
    for path, name in NAMED:
        assert name in listed(path), f"{path}::{name}"


def test_no_error_of_the_ntk_paper_is_left_out() -> None:
    path = "tests/learners/test_ntk.py"
    shown = {name for name in listed(path) if name.startswith("TestErrorsOfThePaper::")}
    assert shown == {name for named, name in NAMED if named == path}
