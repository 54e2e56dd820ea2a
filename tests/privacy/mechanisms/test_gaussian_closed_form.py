"""δ of the Gaussian mechanism over its whole domain, against mpmath by two methods."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from ndis_reference import gaussian_difference, gaussian_integral

from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError

POINTS = [
    (mu, epsilon)
    for mu in (1e-12, 1e-7, 1e-3, 0.0999, 0.1001, 0.7, 3.0, 40.0)
    for epsilon in (0.0, 0.3 * mu, 5 * mu, 30 * mu, 2.0, 10.0)
]


@pytest.mark.parametrize(("mu", "epsilon"), POINTS)
def test_it_agrees_with_high_precision(mu: float, epsilon: float) -> None:
    found = float(gaussian.log_delta(1 / mu, epsilon))
    expected = mp.log(gaussian_difference(1 / (1 / mu), epsilon))
    if expected > -690:
        assert abs(mp.expm1(found - expected)) < 1e-10
        delta = float(np.exp(gaussian.log_delta(1 / mu, epsilon)))
        assert delta == pytest.approx(math.exp(found), rel=1e-14)
    else:
        assert abs(found / expected - 1) < 1e-8


@pytest.mark.parametrize(("mu", "epsilon"), [(1e-3, 4e-3), (0.7, 3.0), (3.0, 0.0)])
def test_the_second_method_agrees_with_the_first(mu: float, epsilon: float) -> None:
    assert abs(gaussian_integral(mu, epsilon) / gaussian_difference(mu, epsilon) - 1) < 1e-20


def test_no_value_is_lost_over_the_whole_range() -> None:
    multipliers = np.concatenate([[0.0], 10.0 ** np.arange(-300, 301, 20), [np.inf]])
    found = gaussian.log_delta(multipliers[:, None], [0.0, 1e-300, 1.0, 10.0, 1e300])
    assert not np.isnan(found).any()
    assert (found <= 0).all()
    assert (found[1:] <= found[:-1]).all()
    assert (found[:, 1:] <= found[:, :-1]).all()
    assert (found[0] == 0).all()
    assert (found[-1] == -np.inf).all()


def test_the_inverses_return_to_where_they_came_from() -> None:
    epsilons = np.array([0.0, 1e-6, 0.01, 1.0, 10.0, 100.0])[:, None]
    log_deltas = np.array([-0.01, -1.0, -11.5, -200.0, -690.0])
    multiplier = gaussian.noise_multiplier(epsilons, np.exp(log_deltas))
    again = gaussian.log_delta(multiplier, epsilons)
    assert np.allclose(again, np.broadcast_to(log_deltas, again.shape), rtol=1e-12, atol=1e-11)
    found = gaussian.epsilon(multiplier, np.exp(log_deltas))
    assert np.allclose(found, np.broadcast_to(epsilons, found.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, -1.0, "much"])
def test_what_is_no_multiplier_is_refused(wrong: object) -> None:
    with pytest.raises(FedsimError, match=r"noise_multiplier: .*at least 0"):
        gaussian.log_delta(wrong, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("multiplier", "rounds"), [(0.6, 1), (1.1, 1), (1.1, 12), (5.0, 100)])
def test_composition_agrees_with_the_pld_accountant(multiplier: float, rounds: int) -> None:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier), rounds)
    expected = accountant.get_epsilon(1e-5)
    found = gaussian.epsilon(multiplier / math.sqrt(rounds), 1e-5)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert found <= expected + 1e-6  # PLD discretizes pessimistically


@pytest.mark.parametrize("target", [1e-12, 1e-5, 0.3])
def test_it_falls_with_the_noise_over_the_whole_range(target: float) -> None:
    multipliers = [10.0**k for k in range(-300, 15, 3)]
    found = [gaussian.epsilon(multiplier, target) for multiplier in multipliers]
    assert found[0] == gaussian.epsilon(0.0, target) == math.inf
    assert found[-1] == 0.0
    assert all(a >= b for a, b in pairwise(found))
    # far below 1, ε is close to 1 / (2 z²)
    assert gaussian.epsilon(1e-9, target) == pytest.approx(5e17, rel=1e-6)
