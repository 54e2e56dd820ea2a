"""What a sample of scores says: spread, extremes, and Student's confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 3
"""Values of which an interval is stated."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A sample in figures. `std` needs at least two values, and the interval three."""

    n: int
    mean: float
    std: float | None
    """Sample standard deviation (n - 1)."""
    median: float
    min: float
    max: float
    low: float | None
    high: float | None
    """Student's interval of the mean, at `confidence`."""
    confidence: float

    @property
    def certain(self) -> float:
        """The lower end of the interval; the mean of values that are too few for one."""
        return self.mean if self.low is None else self.low


def student_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Student's confidence interval of the mean (Biometrika 6, 1908): mean ± t s / sqrt(n).

    It holds for independent values of a normal distribution, for any number of them. Of two it is
    so wide (t = 12.7 at 95%) that `summarize` states none.

    Raises:
        ValueError: fewer than two values, one that is not finite, or a confidence outside (0, 1).
    """
    from scipy.stats import t

    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError("an interval of the mean needs at least two finite values")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    n = len(sample)
    half = t.ppf((1 + confidence) / 2, n - 1) * sample.std(ddof=1) / np.sqrt(n)
    return float(sample.mean() - half), float(sample.mean() + half)


def summarize(values: Sequence[float], *, confidence: float = 0.95) -> Summary | None:
    """Summary of `values`; None of an empty sample."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    several = len(sample) > 1
    low, high = None, None
    if len(sample) >= LEAST:
        low, high = student_interval(values, confidence=confidence)
    return Summary(
        n=len(sample),
        mean=float(sample.mean()),
        std=float(sample.std(ddof=1)) if several else None,
        median=float(np.median(sample)),
        min=float(sample.min()),
        max=float(sample.max()),
        low=low,
        high=high,
        confidence=confidence,
    )
