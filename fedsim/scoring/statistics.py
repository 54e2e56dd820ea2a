"""What a sample of scores says: spread, extremes, and a bootstrap confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 22
"""Drawn values held in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A sample in figures. `std` and the interval need at least two values."""

    n: int
    mean: float
    std: float | None
    """Sample standard deviation (n - 1)."""
    median: float
    min: float
    max: float
    low: float | None
    high: float | None
    """Percentile bootstrap interval of the mean, at `confidence`."""
    confidence: float


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap confidence interval of the mean (Efron, Annals of Statistics 7, 1979).

    Same arguments, same interval. It holds for independent values; with a handful of them it is
    narrower than it should be.

    Raises:
        ValueError: fewer than two values, one that is not finite, or a confidence outside (0, 1).
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError("a bootstrap interval needs at least two finite values")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    stream = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(sample))
    means = np.concatenate(
        [
            sample[
                stream.integers(len(sample), size=(min(rows, resamples - done), len(sample)))
            ].mean(axis=1)
            for done in range(0, resamples, rows)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def summarize(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Summary | None:
    """Summary of `values`; None of an empty sample."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    several = len(sample) > 1
    low, high = (
        bootstrap_interval(values, confidence=confidence, seed=seed) if several else (None, None)
    )
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
