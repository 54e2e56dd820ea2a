"""The bootstrap interval: reproducible, of the stated coverage, absent where it says nothing."""

from __future__ import annotations

import numpy as np
import pytest

from fedsim.scoring import bootstrap_interval, summarize


def test_figures_of_a_known_sample() -> None:
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.n, summary.mean, summary.median) == (3, 3.0, 2.0)
    assert (summary.min, summary.max) == (1.0, 6.0)
    assert summary.std == pytest.approx(7**0.5)
    assert summary.low is not None
    assert summary.high is not None
    assert 1.0 <= summary.low < 3.0 < summary.high <= 6.0


def test_one_value_has_no_interval_and_none_has_no_summary() -> None:
    one = summarize([4.0])
    assert one is not None
    assert (one.mean, one.std, one.low, one.high) == (4.0, None, None, None)
    assert summarize([]) is None


def test_same_seed_same_interval() -> None:
    values = list(np.random.default_rng(0).normal(size=20))
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_interval_of_a_large_sample_is_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=3000)
    low, high = bootstrap_interval(list(values), resamples=2000)
    half = 1.96 * values.std(ddof=1) / len(values) ** 0.5
    assert low == pytest.approx(values.mean() - half, abs=0.012)
    assert high == pytest.approx(values.mean() + half, abs=0.012)


def test_it_covers_the_mean_as_often_as_it_says() -> None:
    stream = np.random.default_rng(1)
    covered = 0
    for seed in range(300):
        low, high = bootstrap_interval(
            list(stream.normal(size=30)), confidence=0.9, resamples=400, seed=seed
        )
        covered += low <= 0.0 <= high
    assert 0.84 <= covered / 300 <= 0.95  # 0.9, less a little at n = 30; standard error 0.017


@pytest.mark.parametrize("values", [[], [1.0], [1.0, float("nan")]])
def test_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two finite"):
        bootstrap_interval(values)
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_interval([1.0, 2.0], confidence=1.5)
