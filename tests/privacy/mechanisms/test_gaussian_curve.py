"""The exact curve of the Gaussian mechanism, against its formula and dp_accounting's PLD."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedsim.privacy.numerics import gaussian


def delta(multiplier: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, written down as it stands."""
    mu = 1 / multiplier
    upper = norm.cdf(mu / 2 - epsilon / mu)
    return float(upper - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@settings(max_examples=100, deadline=None)
@given(multiplier=st.floats(0.15, 50), target=st.floats(1e-9, 0.5))
def test_it_inverts_the_formula(multiplier: float, target: float) -> None:
    epsilon = gaussian.epsilon(multiplier, target)
    if epsilon == 0:
        assert delta(multiplier, 0.0) <= target * (1 + 1e-9)
    else:
        assert delta(multiplier, epsilon) == pytest.approx(target, rel=1e-4, abs=1e-12)


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
    assert found[0] == math.inf
    assert found[-1] == 0.0
    assert all(a >= b for a, b in pairwise(found))
    # far below 1, ε is close to 1 / (2 z²)
    assert gaussian.epsilon(1e-9, target) == pytest.approx(5e17, rel=1e-6)


def test_no_noise_is_infinite() -> None:
    assert gaussian.epsilon(0.0, 1e-5) == math.inf
