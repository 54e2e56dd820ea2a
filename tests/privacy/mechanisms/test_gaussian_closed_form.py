"""δ of the Gaussian mechanism over its whole domain, against mpmath by two methods."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from ndis_reference import gaussian_difference

from fedsim.privacy.numerics import gaussian

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
