"""What a claim says of membership in updates, and at which rate of false accusations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from fedsim.privacy.membership import certain_rate, row_claim, share_p_value, tpr_limit
from fedsim.targets.membership import membership_auc_beyond_chance
from fedsim.types import FedsimError


def test_a_rate_is_exceeded_as_rarely_as_it_says() -> None:
    """The true rate of a threshold at the k-th highest of n uniform scores is 1 - that score."""
    stream = np.random.default_rng(0)
    thresholds = np.sort(stream.random((20_000, 99)))[:, -2]
    exceeded = np.mean(1 - thresholds > certain_rate(2, 99))
    assert abs(exceeded - 0.025) < 4 * math.sqrt(0.025 * 0.975 / 20_000)


def test_a_threshold_has_to_be_a_score() -> None:
    with pytest.raises(FedsimError, match="accused: expected 1 to 9, got 10"):
        certain_rate(10, 9)


def test_a_claim_that_holds_is_refuted_as_rarely_as_its_p_value_says() -> None:
    """Members are told at the very most that ε allows, by the true rate of each threshold."""
    stream = np.random.default_rng(0)
    rates = 1 - np.sort(stream.random((400, 199)))[:, -2]
    told = stream.binomial(200, [tpr_limit(1.0, 0.0, rate) for rate in rates])
    levels = [share_p_value(int(each), 200, 2, 199, 1.0, 0.0) for each in told]
    assert sum(level <= 0.1 for level in levels) <= 0.1 * len(levels)
    # Twice as much is above what ε allows at any rate that the threshold may have.
    assert share_p_value(100, 200, 2, 199, 1.0, 0.0) < 1e-6


def test_a_p_value_is_where_the_intervals_end_meets_the_limit() -> None:
    level = share_p_value(30, 100, 2, 199, 1.0, 0.0)
    low = scipy.stats.binomtest(30, 100).proportion_ci(1 - level, "exact").low
    limit = tpr_limit(1.0, 0.0, certain_rate(2, 199, level / 2))
    assert low == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize("shown", [9, 11, 40, 150])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_a_delta_that_shows_many_members_at_once_is_as_rare_as_the_p_value(
    shown: int, delta: float
) -> None:
    """Showing so many of 150 members with a chance of δ 150 / `shown` is (0, δ)-private."""
    chance = min(1.0, delta * 150 / shown)
    assert share_p_value(shown, 150, 1, 150, 0.0, delta) >= chance


def test_a_small_delta_still_lets_members_refute() -> None:
    assert share_p_value(80, 100, 1, 99, 1.0, 1e-5) < 1e-3
    # Where hardly any others are left to take the shown ones from, those told are still counted.
    assert share_p_value(3, 3, 2, 2, 0.0, 1e-5) <= 1.0
    with pytest.raises(FedsimError, match="delta: 2"):
        share_p_value(3, 10, 1, 10, 0.0, 2.0)


def test_only_relations_that_tell_an_examples_presence_bound_it() -> None:
    assert row_claim("example", "add_or_remove", 2.0, 1e-5, sampled=False) == (2.0, 1e-5)
    assert row_claim("client", "replace_one", 2.0, 1e-5, sampled=False) == (2.0, 1e-5)
    # Without sampling another example takes the place of an absent one.
    assert row_claim("example", "zero_out", 2.0, 1e-5, sampled=False) is None
    assert row_claim("example", "replace_one", 2.0, 1e-5, sampled=True) is None
    assert row_claim("example", "close", 2.0, 1e-5, sampled=True) is None


def test_a_sampled_examples_absence_changes_how_others_are_sampled() -> None:
    """One example of n = 2 in batches of about one: alone, the other is drawn for certain.

    Both contribute along axes of their own. The claim, where only the example's contribution goes,
    bounds this less than it says.
    """
    line = np.linspace(-8, 9, 500)
    zero, one = scipy.stats.norm.pdf(line), scipy.stats.norm.pdf(line, 1)
    half = (zero + one) / 2

    def delta(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
        step = (line[1] - line[0]) ** first.ndim
        ways = ((first, second), (second, first))
        return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) * step for p, q in ways)

    epsilon = 3.6  # the ledger's for a rate of 1/2 and a noise of 1 is 3.53
    assert delta(half, zero, epsilon) < 1e-5
    present, alone = np.outer(half, half), np.outer(zero, one)
    assert delta(present, alone, epsilon) > 1e-4
    bound = row_claim("example", "zero_out", epsilon, 1e-5, sampled=True)
    assert bound is not None
    # With the number of examples kept, another one comes for the one that goes.
    here, there = np.outer(half, zero), np.outer(zero, half)
    assert delta(here, there, epsilon) > 1e-5 and delta(here, there, bound[0]) < bound[1]


@pytest.mark.parametrize("relation", ["zero_out", "add_or_remove"])
def test_a_client_that_goes_and_comes_is_a_group_of_two(relation: str) -> None:
    """The client takes part in both worlds, with and without the example."""
    epsilon, delta = row_claim("client", relation, 2.0, 1e-5, sampled=False) or (0, 0)
    assert epsilon == 4.0
    assert delta == pytest.approx((1 + math.exp(2)) * 1e-5)
    assert row_claim("client", relation, 1000.0, 1e-5, sampled=False) == (math.inf, 0.0)
    sampled = row_claim("example", "zero_out", 2.0, 1e-5, sampled=True)
    assert sampled == row_claim("client", relation, 2.0, 1e-5, sampled=True)


def test_the_auc_of_few_candidates_is_sure_of_little() -> None:
    for count, low in ((3, 0.501), (10, 0.741), (1000, 0.974)):
        members = torch.arange(2 * count) < count
        assert membership_auc_beyond_chance(members.double(), members) == pytest.approx(
            low, abs=2e-3
        )
    # Of guesses 97.5% lie below the bound, so that their lower ends are below a coin's.
    draws = torch.rand(400, 40, generator=torch.Generator().manual_seed(0))
    members = torch.arange(40) < 20
    above = sum(float(membership_auc_beyond_chance(each, members)) > 0.5 for each in draws)
    assert above <= 0.05 * len(draws)
