"""Counts agree with their nouns, in every message and on every page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.words import number_of

ROOT = Path(__file__).parent.parent
COUNTED = (
    "attacks canaries channels clients columns draws entries examples features guesses images "
    "items keys lines neurons parameters problems recordings rounds rows runs scenarios steps "
    "trials updates values variants"
)
COUNT = re.compile(rf"\x00(?: (?!needs|has)\w+)? (?:{'|'.join(COUNTED.split())})\b")


@pytest.mark.parametrize(
    ("count", "words", "told"),
    [
        (0, ("image",), "0 images"),
        (1, ("image",), "1 image"),
        (2, ("image",), "2 images"),
        (1, ("batch", "batches"), "1 batch"),
        (12345, ("batch", "batches"), "12,345 batches"),
    ],
)
def test_a_noun_follows_its_number(count: int, words: tuple[str, ...], told: str) -> None:
    assert number_of(count, *words) == told


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of every f-string, or of a template's lines; \\x00 is a value."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".j2":
        for number, line in enumerate(source.splitlines(), start=1):
            yield number, re.sub(r"\{\{.*?\}\}", "\x00", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (str(p.value) if isinstance(p, ast.Constant) else "\x00" for p in node.values)
            yield node.lineno, "".join(parts)


def test_no_message_has_a_plural_after_a_number_that_may_be_one() -> None:
    sources = [
        path
        for folder in ("fedsim", "attacks", "defenses")
        for kind in ("*.py", "*.j2")
        for path in (ROOT / folder).rglob(kind)
    ]
    assert len(sources) > 200
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {text}".replace("\x00", "{}")
        for path in sources
        for number, text in texts(path)
        if COUNT.search(text)
    ]
    assert not wrong, "use number_of: " + "\n".join(wrong)
