"""Student's interval: of the stated coverage from three values on, absent where it says nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedsim.scoring import student_interval, summarize


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


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_it_covers_the_mean_as_often_as_it_says(count: int) -> None:
    """Of percentile bootstrap intervals at 95%, 52% of two values did, 71% of three."""
    stream = np.random.default_rng(count)
    samples = stream.normal(3.0, 2.0, size=(4000, count))
    inside = [low <= 3.0 <= high for low, high in map(student_interval, samples.tolist())]
    assert 0.935 <= np.mean(inside) <= 0.965  # standard error 0.0035


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")]])
def test_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two finite"):
        student_interval(values)
    with pytest.raises(ValueError, match="confidence"):
        student_interval([1.0, 2.0], confidence=1.5)
