"""The one-run audit: its p-value against the definition, its coverage at the true ε, bad input."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy.stats import binom

from fedsim.audit.bounds import one_run_bound, one_run_p_value
from fedsim.types import FedsimError

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
    found = one_run_p_value(30, guesses, correct, epsilon, delta)
    assert found == pytest.approx(by_hand(30, guesses, correct, epsilon, delta), rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [slow(0.5, 0.0), slow(2.0, 0.0), (1.0, 0.02), (0.3, 0.1)],
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
