"""Intervals: of the stated coverage, absent where they say nothing, exact where success is rare."""

import numpy as np
import pytest
from scipy import stats

from fedsim.scoring import accuracy, learning_problem, share, student_interval, summarize


def test_figures_of_a_known_sample():
    summary = summarize([1.0, 2.0, 6.0])
    assert (summary.n, summary.mean, summary.median) == (3, 3.0, 2.0)
    assert (summary.min, summary.max) == (1.0, 6.0)
    assert summary.std == pytest.approx(7**0.5)
    for few in ([4.0], [4.0, 5.0]):
        short = summarize(few)
        assert (short.n, short.low, short.high) == (len(few), None, None)
    assert summarize([]) is None
    with pytest.raises(ValueError, match="finite"):
        summarize([1.0, float("nan")])


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_interval_is_scipys_at_its_label(confidence):
    values = list(np.random.default_rng(0).normal(size=7))
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    assert student_interval(values, confidence=confidence) == pytest.approx(tuple(expected))
    summary = summarize(values, confidence=confidence)
    assert (summary.low, summary.high) == pytest.approx(tuple(expected))
    assert summary.confidence == confidence


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")]])
def test_refused(values):
    with pytest.raises(ValueError, match="at least two finite"):
        student_interval(values)
    with pytest.raises(ValueError, match="confidence"):
        student_interval([1.0, 2.0], confidence=1.5)


@pytest.mark.parametrize("value", [0.0, 48.0, 0.1])
def test_equal_values_have_no_interval(value):
    """A width of zero would read as certainty, as of ten trials of +0.0 dB."""
    values = [value] * 9 + [value * (1 + 1e-15)]
    equal = summarize(values)
    assert (equal.low, equal.high, equal.certain) == (None, None, equal.mean)
    assert equal.best_of(4).low is None
    assert summarize([*values[:-1], value + 1e-3]).low is not None


@pytest.mark.parametrize(("count", "n"), [(0, 10), (1, 10), (10, 10), (3, 7), (0, 1)])
def test_the_interval_of_a_share_is_clopper_and_pearsons(count, n):
    """By quantiles of the beta distribution, and of 10 trials that none tells at most 31%."""
    interval = share(count, n)
    low = stats.beta.ppf(0.025, count, n - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, n - count) if count < n else 1.0
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert str(share(0, 10)) == "0 of 10 (0 to 31%)"
    assert str(share(1, 10)) == "1 of 10 (0 to 45%)"


def test_the_best_of_many_has_bonferronis_interval():
    values = list(np.random.default_rng(1).normal(size=6))
    summary = summarize(values)
    best = summary.best_of(8)
    assert (best.low, best.high) == pytest.approx(student_interval(values, confidence=1 - 0.05 / 8))
    assert (best.confidence, best.compared) == (0.95, 8)
    assert summary.best_of(1) == summary


def test_a_release_in_closed_form_has_no_learning_rate_to_lower():
    """The loss of least squares is no cross-entropy, however large."""
    share = accuracy(0.5, 100, 0.5)
    trained, released = (learning_problem(share, 9.0, trains=each) for each in (True, False))
    assert trained and "diverged" in trained and "learning rate" in trained
    assert released and "diverged" not in released and "learning rate" not in released
    assert learning_problem(accuracy(0.9, 100, 0.5), 9.0, trains=False) is None
