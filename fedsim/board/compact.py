"""Keeps a page's data small: texts once each, figures with the digits that are shown."""

from __future__ import annotations

import math

from fedsim.report.figures import format_bound
from fedsim.scoring import Summary

SHOWN = 300
"""A text of more characters is cut on the page; the run's files have all of it."""

SENTENCE = 1000
"""Likewise of a sentence that is made of such texts."""

_DIGITS = 6
"""Figures keep so many significant digits."""


class Texts:
    """Numbers texts in the order in which they come; equal ones get the same number."""

    def __init__(self) -> None:
        """Starts without a text."""
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Returns the number of `text`. Two long texts that differ keep different numbers."""
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        """Returns the texts as shown, by their numbers."""
        return [shortened(text) for text in self._numbers]


def shortened(text: str, most: int = SHOWN) -> str:
    """Returns `text`, cut behind `most` characters with a note of its length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def figure(value: float | None) -> float | str | None:
    """Returns a number as JSON can hold it: rounded, with `inf` as a text.

    >>> figure(0.123456789), figure(float("inf")), figure(None)
    (0.123457, 'inf', None)
    """
    if value is None:
        return None
    if not math.isfinite(value):
        return "inf" if value > 0 else None
    return float(f"{value:.{_DIGITS}g}")


def exact(value: float | None) -> float | str | None:
    """Returns a number as JSON can hold it, unrounded: no ε may be below the claim."""
    return "inf" if value is not None and math.isinf(value) else value


def bound_text(audited: float | None) -> str:
    """Words the ε that an audit found, rounded down; a dash without an audit."""
    return "–" if audited is None else format_bound(audited)


def interval(summary: Summary | None) -> list[float | str | None]:
    """Returns [mean, low, high], with None for what there is not."""
    if summary is None:
        return [None, None, None]
    return [figure(summary.mean), figure(summary.low), figure(summary.high)]
