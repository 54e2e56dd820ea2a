"""Poisson sampling at δ below the rounding of privacy loss distributions, against mpmath."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest

from fedsim.privacy.composition import poisson
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.privacy.numerics import gaussian

RATE, NOISE, STEPS = 250 / 750_000, 4.0, 10_000


def curve(**changes: float) -> CorrelatedCurve:
    keys = {"steps": STEPS, "sampling_rate": RATE, "noise_multiplier": NOISE}
    return CorrelatedCurve.model_validate({**keys, "sampling": "poisson", **changes})


def divergence(order: int, rate: float, noise: float) -> mp.mpf:
    """Of one release (Mironov, Talwar and Zhang 2019, Section 3.3), in sixty digits."""
    with mp.workdps(60):
        q, z = mp.mpf(rate), mp.mpf(noise)
        moment = sum(
            mp.binomial(order, k) * (1 - q) ** (order - k) * q**k * mp.exp((k * k - k) / (2 * z**2))
            for k in range(order + 1)
        )
        return mp.log(moment) / (order - 1)


@pytest.mark.parametrize(("rate", "noise"), [(RATE, NOISE), (0.3, 0.7), (1e-6, 50.0), (0.999, 2.0)])
def test_divergences_are_those_of_sixty_digits_and_never_less(rate: float, noise: float) -> None:
    found = poisson._divergences(rate, noise)
    for order in (2, 3, 17, 64, 255, 1000):
        exact = divergence(order, rate, noise)
        stated = float(found[poisson._ORDERS.index(order)])
        assert 0 <= stated - exact <= 1e-10 * (1 + exact)


def test_epsilon_grows_by_steps_as_delta_falls() -> None:
    """It jumped from 0.05 to 3.2 where losses are rounded, and was said to be of these."""
    deltas = (1e-5, 1e-10, 1e-11, 1e-12, 2e-13, 1e-14, 1e-30, 1e-200)
    found = [curve().epsilon(delta) for delta in deltas]
    stated = [answer.epsilon for answer in found]
    assert stated == sorted(stated)
    assert stated[2] < 0.06 and stated[3] < 0.093 and stated[5] < 0.12
    assert [found[0].method, found[3].method] == [poisson.PLD, poisson.RENYI]
    # the best of the whole orders, by the formula of Canonne, Kamath and Steinke
    with mp.workdps(60):
        least = min(
            STEPS * divergence(order, RATE, NOISE)
            + mp.log1p(mp.mpf(-1) / order)
            - (mp.log(mp.mpf("1e-12")) + mp.log(order)) / (order - 1)
            for order in range(245, 262)
        )
    assert stated[3] == pytest.approx(float(least), rel=1e-6)


def test_one_step_is_no_more_than_without_sampling_and_no_less_than_the_truth() -> None:
    """Its curve is known: q of the Gaussian's one way, and its reverse."""
    for delta in (1e-3, 1e-6, 1e-13, 1e-20, 1e-60):
        one = curve(steps=1, sampling_rate=0.2, noise_multiplier=1.0).epsilon(delta)
        full = curve(steps=1, sampling_rate=1.0, noise_multiplier=1.0).epsilon(delta)
        assert one.epsilon <= full.epsilon * (1 + 1e-9)
        with mp.workdps(80):
            q = mp.mpf("0.2")

            def truth(eps: mp.mpf, q: mp.mpf = q) -> mp.mpf:
                # P = (1-q) N(0,1) + q N(1,1) exceeds e^ε N(0,1) above one point
                edge = mp.mpf(1) / 2 + mp.log((mp.exp(eps) - (1 - q)) / q)
                tail = mp.erfc(edge / mp.sqrt(2)) / 2
                moved = mp.erfc((edge - 1) / mp.sqrt(2)) / 2
                return (1 - q) * tail + q * moved - mp.exp(eps) * tail

            assert truth(mp.mpf(one.epsilon)) <= delta


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_of_whole_samples_it_is_the_gaussian_of_all_steps(epsilon: float) -> None:
    """No bound may be below the truth, which is known where every step takes the example."""
    exact = float(gaussian.log_delta(np.array(10.0 / math.sqrt(100)), epsilon))
    found, _ = poisson.least_bound(10.0, epsilon, steps=100, sampling_rate=1.0)
    assert found == pytest.approx(exact, rel=1e-9)
    losses = float(poisson._distribution(1.0, 10.0, 100).get_delta(epsilon))
    assert exact - 1e-9 <= math.log(losses) <= exact + 0.01
