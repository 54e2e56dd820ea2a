"""Words counts in messages, tables and reports."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Words a count: `1 image`, `2 images`; `plural` is for nouns that take more than an s.

    >>> number_of(1, "row"), number_of(0, "row"), number_of(2000, "batch", "batches")
    ('1 row', '0 rows', '2,000 batches')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def in_trials(count: int, n: int) -> str:
    """Words in how many of `n` trials something happened.

    >>> in_trials(3, 3), in_trials(2, 3), in_trials(2, 2), in_trials(1, 1)
    ('in all 3 trials', 'in 2 of 3 trials', 'in both trials', 'in the only trial')
    """
    if count < n or not n:
        return f"in {count or 'none'} of {number_of(n, 'trial')}"
    return {1: "in the only trial", 2: "in both trials"}.get(n, f"in all {number_of(n, 'trial')}")


def printable(text: str) -> str:
    r"""Replaces what would move a terminal's cursor, or colour it, by spaces.

    >>> printable("a\x1b[31mb")
    'a [31mb'
    """
    return "".join(c if c.isprintable() else " " for c in text)


def join(values: Iterable[object]) -> str:
    """Joins at least one value by commas, and the last one by `and`.

    >>> join("a"), join("ab"), join("abc")
    ('a', 'a and b', 'a, b and c')
    """
    *head, last = map(str, values)
    return f"{', '.join(head)} and {last}" if head else last


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the choice nearest to `word`, or an empty text."""
    choices = list(choices)
    # Reversed, so that of choices that differ in case alone the first one stays.
    lowered = {choice.lower(): choice for choice in reversed(choices)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""
