"""Words counts in messages, tables and reports."""

from __future__ import annotations


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Words a count: `1 image`, `2 images`; `plural` is for nouns that take more than an s.

    >>> number_of(1, "row"), number_of(0, "row"), number_of(2000, "batch", "batches")
    ('1 row', '0 rows', '2,000 batches')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    r"""Replaces what would move a terminal's cursor, or colour it, by spaces.

    >>> printable("a\x1b[31mb")
    'a [31mb'
    """
    return "".join(c if c.isprintable() else " " for c in text)
