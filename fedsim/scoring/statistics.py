"""Summarizes a sample of scores, and a test accuracy beside chance, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from fedsim.words import number_of

LEAST = 3
"""Least number of values for which an interval is stated."""
_ROUNDING = 1e-9
"""Largest difference of values that count as equal, as a share of the largest magnitude."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summarizes a sample of `n` values by its mean, spread and interval."""

    n: int
    mean: float
    std: float | None
    """Standard deviation of the sample, with n - 1; None for one value."""
    median: float
    min: float
    max: float
    low: float | None
    high: float | None
    """`low` and `high`: Student's interval of the mean, at `confidence` for all `compared` samples.
    None for fewer than three values, and for equal ones."""
    confidence: float
    compared: int = 1
    """Number of samples among which this one was chosen; the interval allows for that."""

    @property
    def certain(self) -> float:
        """Lower end of the interval of the mean; the mean itself if there is no interval."""
        return self.mean if self.low is None else self.low

    def best_of(self, compared: int) -> Summary:
        """Returns the summary as one chosen among `compared` >= 1: with Bonferroni's interval."""
        if self.low is None or self.std is None:
            return replace(self, compared=compared)
        half = _half_width(self.std, self.n, 1 - (1 - self.confidence) / compared)
        return replace(self, low=self.mean - half, high=self.mean + half, compared=compared)


@dataclass(frozen=True, kw_only=True)
class Share:
    """States how many of `n` independent trials had a property, with an exact interval."""

    count: int
    n: int
    low: float
    high: float
    """`low` and `high` are Clopper and Pearson's interval of `count` / `n`, at `confidence`."""
    confidence: float

    def best_of(self, compared: int) -> Share:
        """Returns the share as one chosen among `compared` >= 1: with Bonferroni's interval."""
        wide = share(self.count, self.n, confidence=1 - (1 - self.confidence) / compared)
        # Wider, but what holds for all shares together is still `confidence`.
        return replace(wide, confidence=self.confidence)

    def __str__(self) -> str:
        """Formats as `1 of 10 (0 to 45%)`."""
        return f"{self.count} of {self.n} ({100 * self.low:.0f} to {self.high:.0%})"


def student_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns (low, high), Student's interval of the mean of `values` at `confidence` in (0, 1).

    A ValueError refuses another confidence, fewer than two values, and one that is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < 2 or not np.isfinite(sample).all():
        raise ValueError("an interval of the mean needs at least two finite values")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    half = _half_width(float(sample.std(ddof=1)), len(sample), confidence)
    return float(sample.mean() - half), float(sample.mean() + half)


def _half_width(std: float, n: int, confidence: float) -> float:
    # The spread is estimated from the sample itself, hence Student's t with n - 1 degrees of
    # freedom.
    return float(_quantile(n - 1, confidence) * std / np.sqrt(n))


@cache  # tables have thousands of intervals, of few sizes
def _quantile(freedom: int, confidence: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))


@cache
def share(count: int, n: int, *, confidence: float = 0.95) -> Share:
    """Returns the share of 0 <= `count` <= `n` in `n` >= 1 trials, with its exact interval."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    # At each end the share is so small, or so large, that the count has the chance `tail`.
    low = float(betaincinv(count, n - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, n - count, 1 - tail)) if count < n else 1.0
    return Share(count=count, n=n, low=low, high=high, confidence=confidence)


@cache
def chance_of(more: int, others: int, fewer: int, rest: int) -> float:
    """Returns the one-sided p-value of Fisher's exact test (1935) of two series of trials.

    It is the probability that the first series has at least `more` successes if both have the same
    chance, given the sizes and all successes together.

    Args:
        more: successes of the first series.
        others: failures of the first series.
        fewer: successes of the second series.
        rest: failures of the second series.
    """
    first, second, successes = more + others, fewer + rest, more + fewer
    tables = sum(
        math.comb(first, k) * math.comb(second, successes - k)
        for k in range(more, min(first, successes) + 1)
    )
    return tables / math.comb(first + second, successes)


def summarize(values: Sequence[float], *, confidence: float = 0.95) -> Summary | None:
    """Summarizes `values`, None for an empty sample; a ValueError refuses NaN and infinity."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError("values: expected finite numbers, got NaN or infinity")
    several = len(sample) > 1
    low, high = None, None
    spread = float(sample.max() - sample.min())
    # Equal values, or equal but for rounding, have no spread that an interval could rest on.
    if len(sample) >= LEAST and spread > _ROUNDING * float(np.abs(sample).max()):
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


def rank_area(inside: ArrayLike, outside: ArrayLike) -> float:
    """Returns the AUC: the share of pairs with `inside` above `outside`, ties as half; 1-d each."""
    members, others = np.asarray(inside, np.float64), np.sort(np.asarray(outside, np.float64))
    # Mann and Whitney's statistic: how many of the others lie below each, and how many tie.
    below, upto = (np.searchsorted(others, members, side=side) for side in ("left", "right"))
    return float((below + upto).mean() / (2 * len(others)))


def area_deviation(inside: int, outside: int) -> float:
    """Returns the standard deviation of `rank_area` for so many scores of one distribution.

    Both numbers are at least 1. Source: Mann and Whitney, 1947.
    """
    return math.sqrt((inside + outside + 1) / (12 * inside * outside))


_DIVERGED = 2.0
"""Ratio of a test loss to that at chance from which a model without skill has diverged."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """States the share of a test set that a model classified correctly, with an interval."""

    share: float
    examples: int
    chance: float
    """Share of the test set's most frequent class, which needs no model."""
    low: float
    high: float
    """`low` and `high` are the ends of Wilson's interval of the share, at `confidence`."""
    confidence: float

    @property
    def is_chance(self) -> bool:
        """Whether the interval reaches down to `chance`: the model is not shown to beat it."""
        return self.low <= self.chance

    @property
    def skill(self) -> float:
        """`share` less `chance`: how much of the test set is right beyond chance."""
        return self.share - self.chance

    def overlaps(self, other: Accuracy) -> bool:
        """Returns whether the intervals of this accuracy and the `other` one overlap."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        """Formats as `91.2% of 80 test examples (83.0 to 95.7%; chance 25.0%)`."""
        return (
            f"{self.share:.1%} of {number_of(self.examples, 'test example')} "
            f"({100 * self.low:.1f} to "
            f"{self.high:.1%}; chance {self.chance:.1%})"
        )


@cache  # of all attacks on one defense it is the same
def accuracy(share: float, examples: int, chance: float, *, confidence: float = 0.95) -> Accuracy:
    """Returns a test accuracy with Wilson's interval (JASA 22, 1927).

    Args:
        share: share of the test set that was classified correctly, in [0, 1].
        examples: size of the test set.
        chance: share of the test set's most frequent class.
        confidence: level of the interval, in (0, 1).
    """
    from scipy.special import ndtri

    # Wilson's interval keeps its level where the normal one fails: near 0, near 1 and for few
    # examples.
    right, z = round(share * examples), float(ndtri((1 + confidence) / 2))
    middle = (2 * right + z**2) / (2 * (examples + z**2))
    half = z * math.sqrt(4 * right * (1 - right / examples) + z**2) / (2 * (examples + z**2))
    return Accuracy(
        share=share,
        examples=examples,
        chance=chance,
        low=middle - half if right else 0.0,
        high=middle + half if right < examples else 1.0,
        confidence=confidence,
    )


def learning_problem(
    accuracy: Accuracy, test_loss: float | None, *, trains: bool = True
) -> str | None:
    """Returns why a model of this `accuracy` cannot show what a defense costs; None if it can.

    `test_loss` is in nats, None if not finite. `trains` is false for releases in closed form.
    """
    if not accuracy.is_chance:
        return None
    if not trains:
        return (
            f"what is released predicts no better than chance: accuracy {accuracy}; use more rows, "
            "or test on more"
        )
    # At most the entropy of the classes, which is the loss of always answering their frequencies.
    chance_loss = -math.log(accuracy.chance)
    if test_loss is None or (chance_loss > 0 and test_loss > _DIVERGED * chance_loss):
        loss = "is not finite" if test_loss is None else f"{test_loss:.3g}"
        return (
            f"training diverged: accuracy {accuracy}, test loss {loss}; lower the learning rate or "
            "the noise"
        )
    return (
        f"the model learned nothing that its test set could show: accuracy {accuracy}; train "
        "longer, or test on more images"
    )
