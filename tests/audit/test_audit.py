"""Lower bounds of ε from scores: known answers, coverage, invariances, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from fedsim.audit.bounds import (
    LEAST_DRAWS,
    _lower_end,
    _one_run_p_value,
    _upper_end,
    gaussian_bound,
    mu_bound,
    one_run_bound,
    threshold_bound,
)
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError

Floats = NDArray[np.float64]
Worlds = Callable[[int, np.random.Generator], tuple[Floats, Floats]]


def shifted(mu: float) -> Worlds:
    return lambda n, rng: (rng.normal(0, 1, n), rng.normal(mu, 1, n))


def randomized_response(epsilon: float, delta: float) -> Worlds:
    """The release that every (ε, δ)-private one is a function of (Kairouz, Oh and Viswanath)."""
    stay = (1 - delta) / (1 + math.exp(-epsilon))
    shares = [delta, stay, 1 - delta - stay, 0.0]

    def draw(n: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        kinds = np.array([-1.0, 0.0, 1.0, 2.0])
        return rng.choice(kinds, n, p=shares), rng.choice(kinds, n, p=shares[::-1])

    return draw


@pytest.mark.parametrize(("successes", "trials"), [(0, 50), (1, 50), (17, 50), (50, 50)])
def test_clopper_pearson_inverts_the_binomial_tails(successes: int, trials: int) -> None:
    low, high = (end(successes, trials, 0.01) for end in (_lower_end, _upper_end))
    if successes:
        assert binom.sf(successes - 1, trials, low) == pytest.approx(0.01, rel=1e-9)
    else:
        assert low == 0
    if successes < trials:
        assert binom.cdf(successes, trials, high) == pytest.approx(0.01, rel=1e-9)
    else:
        assert high == 1


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-6, 0.05])
def test_randomized_response_is_found_almost_whole(epsilon: float, delta: float) -> None:
    absent, present = randomized_response(epsilon, delta)(400_000, np.random.default_rng(1))
    found = threshold_bound(absent, present, delta=delta)
    assert 0.9 * epsilon < found.epsilon <= epsilon
    assert (found.method, found.delta, found.confidence) == ("threshold", delta, 0.99)


@pytest.mark.parametrize(
    ("worlds", "truth"),
    [
        (shifted(1.0), gaussian.epsilon(1.0, 0.01)),
        (randomized_response(1.0, 0.01), 1.0),
        (shifted(0.0), 0.0),
    ],
)
def test_it_is_too_high_no_more_often_than_its_confidence_allows(
    worlds: Worlds, truth: float
) -> None:
    rng = np.random.default_rng(2)
    found = [
        threshold_bound(*worlds(2000, rng), delta=0.01, confidence=0.6).epsilon for _ in range(300)
    ]
    wrong = sum(epsilon > truth for epsilon in found)
    assert binom.sf(wrong - 1, 300, 0.4) > 1e-3


def test_the_gaussian_fit_is_too_high_no_more_often_than_its_confidence_allows() -> None:
    rng = np.random.default_rng(3)
    found = [mu_bound(*shifted(1.0)(2000, rng), error=0.2) for _ in range(300)]
    wrong = sum(mu > 1 for mu in found)
    assert wrong > 0
    assert binom.sf(wrong - 1, 300, 0.4) > 1e-3


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_a_gaussian_release_is_found_to_within_a_tenth(mu: float, delta: float) -> None:
    absent, present = shifted(mu)(1_000_000, np.random.default_rng(4))
    truth = gaussian.epsilon(1 / mu, delta)
    fitted = gaussian_bound(absent, present, delta=delta).epsilon
    assert 0.9 * truth < fitted <= truth
    assert threshold_bound(absent, present, delta=delta).epsilon <= truth


def test_both_directions_are_seen() -> None:
    rng = np.random.default_rng(5)
    narrow, wide = np.abs(rng.normal(0, 1, 100_000)), np.abs(rng.normal(0, 3, 100_000))
    # what is rare under one of them is common under the other only in the upper tail
    one = threshold_bound(narrow, wide, delta=1e-3).epsilon
    other = threshold_bound(-wide, -narrow, delta=1e-3).epsilon
    assert one > 4
    assert one == other


@pytest.mark.parametrize("bound", [threshold_bound, gaussian_bound])
@pytest.mark.parametrize(
    ("absent", "present", "delta", "confidence", "message"),
    [
        (np.zeros((1000, 2)), np.zeros(1000), 0.1, 0.9, r"absent: scores of shape \(1000, 2\)"),
        (np.zeros(1000), np.zeros(LEAST_DRAWS - 1), 0.1, 0.9, "present: 99 scores are too few"),
        (np.zeros(1000), np.full(1000, np.nan), 0.1, 0.9, "present: a score is NaN"),
        (np.zeros(1000), np.zeros(1000), 0.0, 0.9, "delta: 0.0 is not"),
        (np.zeros(1000), np.zeros(1000), 1.0, 0.9, "delta: 1.0 is not"),
        (np.zeros(1000), np.zeros(1000), math.nan, 0.9, "delta: nan is not"),
        (np.zeros(1000), np.zeros(1000), 0.1, 1.0, "confidence: 1.0 is not"),
    ],
)
def test_bad_input_is_refused(
    bound: Callable[..., object],
    absent: Floats,
    present: Floats,
    delta: float,
    confidence: float,
    message: str,
) -> None:
    with pytest.raises(FedsimError, match=message):
        bound(absent, present, delta=delta, confidence=confidence)


slow = partial(pytest.param, marks=pytest.mark.slow)


def by_hand(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Steinke, Nasr and Jagielski 2023, Theorem 5.2, summed as it stands."""
    rate = 1 / (1 + math.exp(-epsilon))

    def chance(count: int) -> float:
        return math.comb(guesses, count) * rate**count * (1 - rate) ** (guesses - count)

    beta = sum(chance(count) for count in range(correct, guesses + 1))
    worst = max(
        (sum(chance(c) for c in range(correct - i, correct)) / i for i in range(1, correct + 1)),
        default=0.0,
    )
    return min(1.0, beta + 2 * canaries * delta * worst)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize(("guesses", "correct"), [(20, 0), (20, 14), (20, 20), (7, 6)])
def test_the_p_value_is_the_theorems(
    epsilon: float, delta: float, guesses: int, correct: int
) -> None:
    found = _one_run_p_value(30, guesses, correct, epsilon, delta)
    assert found == pytest.approx(by_hand(30, guesses, correct, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [slow(0.5, 0.0), slow(2.0, 0.0), (1.0, 0.02), (0.3, 0.1)]
)
@pytest.mark.parametrize("together", [False, True])
def test_at_the_true_epsilon_it_rejects_no_more_than_its_confidence_allows(
    epsilon: float, delta: float, together: bool
) -> None:
    """Of the worst (ε, δ)-private release, per canary or with all coins shown at once."""
    rng, runs, canaries = np.random.default_rng(1), 400, 64
    rejected = 0
    for _ in range(runs):
        coins = rng.random(canaries) < 0.5
        honest = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
        shown = rng.random() < delta if together else rng.random(canaries) < delta
        scores = np.where(coins == honest, 1.0, -1.0)
        scores = np.where(shown, np.where(coins, 2.0, -2.0), scores) + 1e-3 * rng.random(canaries)
        found = one_run_bound(
            scores, coins, delta=max(delta, 1e-12), confidence=0.8, guesses=(32, 64)
        )
        rejected += found.epsilon > epsilon
    assert binom.sf(rejected - 1, runs, 0.2) > 1e-3


def test_what_hides_nothing_is_found_and_what_hides_all_is_not() -> None:
    rng = np.random.default_rng(2)
    coins = rng.random(2000) < 0.5
    shown = one_run_bound(coins + 0.1 * rng.random(2000), coins, delta=1e-6)
    assert shown.epsilon > 4
    assert shown.method == "one_run"
    assert one_run_bound(rng.random(2000), coins, delta=1e-6).epsilon < 0.3
    reverse = one_run_bound(-(coins + 0.1 * rng.random(2000)), coins, delta=1e-6)
    assert reverse.epsilon == 0


def test_randomized_response_is_found_to_within_a_tenth() -> None:
    rng, epsilon, canaries = np.random.default_rng(3), 2.0, 100_000
    coins = rng.random(canaries) < 0.5
    right = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
    found = one_run_bound(np.where(coins == right, 1.0, 0.0), coins, delta=1e-9)
    assert 0.9 * epsilon < found.epsilon <= epsilon


@pytest.mark.parametrize(
    ("scores", "coins", "guesses", "message"),
    [
        (np.zeros(4), np.zeros(3, bool), None, "a score and a boolean"),
        (np.zeros((2, 2)), np.zeros((2, 2), bool), None, "a score and a boolean"),
        (np.zeros(4), np.zeros(4), None, "a score and a boolean"),
        (np.full(4, np.nan), np.zeros(4, bool), None, "NaN"),
        (np.zeros(1), np.zeros(1, bool), None, "expected at least 2, got 1"),
        (np.zeros(4), np.zeros(4, bool), (3,), "even numbers from 2 to 4"),
        (np.zeros(4), np.zeros(4, bool), (6,), "even numbers from 2 to 4"),
        (np.zeros(4), np.zeros(4, bool), (), "even numbers from 2 to 4"),
    ],
)
def test_bad_canaries_are_refused(
    scores: object, coins: object, guesses: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        one_run_bound(scores, coins, delta=1e-3, guesses=guesses)  # type: ignore[arg-type]
