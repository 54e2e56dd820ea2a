"""Words counts, privacy claims and parameters in messages, tables and reports."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Any


def number_of(count: int, noun: str, plural: str = "") -> str:
    """Words a count: `1 image`, `2 images`; an empty `plural` is the noun and an s.

    >>> number_of(1, "row"), number_of(0, "row"), number_of(2000, "batch", "batches")
    ('1 row', '0 rows', '2,000 batches')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def in_trials(count: int, n: int) -> str:
    """Words in how many of `n` trials something happened; `count` is at most `n`.

    >>> in_trials(3, 3), in_trials(2, 3), in_trials(2, 2), in_trials(1, 1)
    ('in all 3 trials', 'in 2 of 3 trials', 'in both trials', 'in the only trial')
    """
    if count < n or not n:
        return f"in {count or 'none'} of {number_of(n, 'trial')}"
    return {1: "in the only trial", 2: "in both trials"}.get(n, f"in all {number_of(n, 'trial')}")


def printable(text: str) -> str:
    r"""Replaces every character that cannot be printed, such as a line's end or ESC, by a space.

    >>> printable("a\x1b[31mb")
    'a [31mb'
    """
    return "".join(c if c.isprintable() else " " for c in text)


def join(values: Iterable[object]) -> str:
    """Joins values by commas, and the last one by `and`; none at all raise a ValueError.

    >>> join("a"), join("ab"), join("abc")
    ('a', 'a and b', 'a, b and c')
    """
    *head, last = map(str, values)
    return f"{', '.join(head)} and {last}" if head else last


def nearest(word: str, choices: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the choice most like `word`; empty if none is like it."""
    choices = list(choices)
    # Reversed, so that of choices that differ in case alone the first one stays.
    lowered = {choice.lower(): choice for choice in reversed(choices)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


def format_epsilon(epsilon: float | None) -> str:
    """Formats ε as `3.2` or `∞`, rounded up to three digits; a dash for None (not accounted).

    A value that exceeds such a number by a millionth of itself or less counts as that number.
    """
    if epsilon is None:
        return "–"
    return "∞" if math.isinf(epsilon) else _round_to(epsilon, 3, ROUND_CEILING)


def format_delta(delta: float) -> str:
    """Formats δ as `1e-05`, with up to six significant digits, rounded as in `format_epsilon`."""
    return _round_to(delta, 6, ROUND_CEILING)


def format_bound(epsilon: float) -> str:
    """Formats an audit's finite lower bound of ε as `format_epsilon` does, but rounded down."""
    return _round_to(epsilon, 3, ROUND_FLOOR)


_SEARCH_ERROR = Decimal("1e-6")
"""Relative error of an ε that comes from the search for a noise scale."""


def _round_to(value: float, digits: int, rounding: str) -> str:
    """Formats `value` with so many significant digits."""
    exact = Decimal(value)
    for mode in (ROUND_HALF_EVEN, rounding):
        short = Context(prec=digits, rounding=mode).plus(exact)
        if abs(short - exact) <= _SEARCH_ERROR * abs(exact):
            break
    return f"{float(short):.{digits}g}"


def format_claim(
    epsilon: float | None, delta: float | None, unit: str | None, relation: str | None
) -> str:
    """Formats ε with its δ, unit and neighbours, as `3.2 (1e-05, example, replace one)`.

    Args:
        epsilon: ε; an infinite one is `∞` alone, and None (not accounted) is a dash.
        delta: δ; None is `δ unknown`.
        unit: Owner of what is hidden, `client` or `example`; None is `unit unknown`.
        relation: Neighbours as in `PrivacyClaim`, with `no DP` where it is none; None is
            `neighbours unknown`.
    """
    if epsilon is None or math.isinf(epsilon):
        return format_epsilon(epsilon)
    words = [format_delta(delta) if delta is not None else "δ unknown"]
    words += [unit or "unit unknown", (relation or "neighbours unknown").replace("_", " ")]
    if relation in NO_DIFFERENTIAL_PRIVACY:
        words.append("no DP")
    return f"{format_epsilon(epsilon)} ({', '.join(words)})"


NO_DIFFERENTIAL_PRIVACY = ("relative", "close")
"""Relations under which an ε does not hide whether an example is present."""


def describe_variant(variant: Mapping[str, Any]) -> str:
    """Formats key path -> value of a sweep's variant as `training.mode=eval, …`; empty for none."""
    return ", ".join(f"{key}={describe_value(value)}" for key, value in variant.items())


_READABLE = 8
"""Numbers of more characters were computed, not chosen, and are shortened."""


def describe_value(value: object) -> str:
    """Formats a parameter's value for readers: as JSON, but text without quotes.

    Floats of more than 8 characters are rounded to four significant digits.
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{value:.4g}" if isinstance(value, float) and len(text) > _READABLE else text
