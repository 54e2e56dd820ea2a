"""Intervals: of the stated coverage, absent where they say nothing, exact where success is rare."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedsim.scoring import accuracy, learning_problem, share, student_interval, summarize


def test_figures_of_a_known_sample() -> None:
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.n, summary.mean, summary.median) == (3, 3.0, 2.0)
    assert (summary.min, summary.max) == (1.0, 6.0)
    assert summary.std == pytest.approx(7**0.5)
    # t of two degrees of freedom at 97.5% is 4.3027 (Student's table).
    half = 4.302652729911275 * 7**0.5 / 3**0.5
    assert (summary.low, summary.high) == pytest.approx((3 - half, 3 + half))
    assert summary.confidence == 0.95


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_values_have_no_interval_and_none_has_no_summary(count: int) -> None:
    few = summarize([4.0, 5.0][:count])
    assert few is not None
    assert (few.n, few.low, few.high) == (count, None, None)
    assert summarize([]) is None


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_interval_is_scipys_at_its_label(confidence: float) -> None:
    values = list(np.random.default_rng(0).normal(size=7))
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    assert student_interval(values, confidence=confidence) == pytest.approx(tuple(expected))
    summary = summarize(values, confidence=confidence)
    assert summary is not None
    assert (summary.low, summary.high) == pytest.approx(tuple(expected))
    assert summary.confidence == confidence


@pytest.mark.parametrize("count", [2, 8])
def test_it_covers_the_mean_as_often_as_it_says(count: int) -> None:
    """Of percentile bootstrap intervals at 95%, 52% of two values did, 71% of three."""
    samples = np.random.default_rng(count).normal(3.0, 2.0, size=(4000, count))
    inside = [low <= 3.0 <= high for low, high in map(student_interval, samples.tolist())]
    assert 0.935 <= np.mean(inside) <= 0.965  # standard error 0.0035


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")]])
def test_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two finite"):
        student_interval(values)
    with pytest.raises(ValueError, match="confidence"):
        student_interval([1.0, 2.0], confidence=1.5)


@pytest.mark.parametrize("value", [0.0, 48.0, 0.1])
def test_equal_values_have_no_interval(value: float) -> None:
    """A width of zero would read as certainty, as of ten trials of +0.0 dB."""
    values = [value] * 9 + [value * (1 + 1e-15)]
    equal = summarize(values)
    assert equal is not None
    assert (equal.low, equal.high, equal.certain) == (None, None, equal.mean)
    assert equal.best_of(4).low is None
    apart = summarize([*values[:-1], value + 1e-3])
    assert apart is not None and apart.low is not None


@pytest.mark.parametrize(("count", "n"), [(0, 10), (1, 10), (10, 10), (3, 7), (0, 1)])
def test_the_interval_of_a_share_is_clopper_and_pearsons(count: int, n: int) -> None:
    """By quantiles of the beta distribution, and of 10 trials that none tells at most 31%."""
    interval = share(count, n)
    low = stats.beta.ppf(0.025, count, n - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, n - count) if count < n else 1.0
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert str(share(0, 10)) == "0 of 10 (0 to 31%)"
    assert str(share(1, 10)) == "1 of 10 (0 to 45%)"


def test_the_best_of_many_has_bonferronis_interval() -> None:
    values = list(np.random.default_rng(1).normal(size=6))
    summary = summarize(values)
    assert summary is not None
    best = summary.best_of(8)
    assert (best.low, best.high) == pytest.approx(student_interval(values, confidence=1 - 0.05 / 8))
    assert (best.confidence, best.compared) == (0.95, 8)
    assert summary.best_of(1) == summary


def test_the_best_of_many_that_see_nothing_seldom_gains() -> None:
    """Of eight the highest lower end is above 0 in 2.5% of cases at most; uncorrected in 18%."""
    stream = np.random.default_rng(2)
    ends = {1: 0, 8: 0}
    for _ in range(600):
        samples = [summarize(values) for values in stream.normal(size=(8, 5)).tolist()]
        for compared in ends:
            lows = [s.best_of(compared).low for s in samples if s]
            ends[compared] += any(low is not None and low > 0 for low in lows)
    assert ends[8] / 600 <= 0.044  # 2.5%, and three standard errors
    assert ends[1] / 600 >= 0.13


def test_a_release_in_closed_form_has_no_learning_rate_to_lower() -> None:
    """The loss of least squares is no cross-entropy, however large."""
    share = accuracy(0.5, 100, 0.5)
    trained, released = (learning_problem(share, 9.0, trains=each) for each in (True, False))
    assert trained and "diverged" in trained and "learning rate" in trained
    assert released and "diverged" not in released and "learning rate" not in released
    assert learning_problem(accuracy(0.9, 100, 0.5), 9.0, trains=False) is None
