"""The Monte-Carlo of the dominating pair, against integrals, PLD and other libraries."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy.special import logsumexp

from fedsim.privacy.composition.dominating_pair import BallsInBins, PairCurve, Poisson, TooFewDraws
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCalibration, CorrelatedCurve


def encoder(steps: int, correlation: float) -> np.ndarray:
    return np.linalg.inv(np.eye(steps) - correlation * np.eye(steps, k=-1))


def integral(
    participations: dict[tuple[int, ...], float], correlation: float, sigma: float, epsilon: float
) -> float:
    """The larger hockey-stick divergence of the pair over one or two steps, on a fine grid."""
    steps = len(next(iter(participations)))
    axis = np.linspace(-9 * sigma, 9 * sigma + 2 / (1 - correlation), 801)
    points = np.stack(np.meshgrid(*[axis] * steps, indexing="ij"), axis=-1)
    cell = (axis[1] - axis[0]) ** steps / (math.sqrt(2 * math.pi) * sigma) ** steps

    def density(mean: np.ndarray) -> np.ndarray:
        squared = ((points - mean) ** 2).sum(axis=-1)
        return np.asarray(cell * np.exp(-squared / (2 * sigma**2)))

    matrix = encoder(steps, correlation)
    here = sum(p * density(matrix @ np.array(z)) for z, p in participations.items())
    there = density(np.zeros(steps))
    grow = math.exp(epsilon)
    return max(
        float(np.maximum(here - grow * there, 0).sum()),
        float(np.maximum(there - grow * here, 0).sum()),
    )


def poisson(steps: int, rate: float) -> dict[tuple[int, ...], float]:
    every = itertools.product([0, 1], repeat=steps)
    return {z: math.prod(rate if one else 1 - rate for one in z) for z in every}


@cache
def estimated(steps: int, rate: float, correlation: float, sigma: float) -> PairCurve:
    return PairCurve(Poisson(steps, rate, correlation), sigma, 10_000, 0)


@pytest.mark.parametrize(
    ("steps", "rate", "correlation", "sigma"),
    [(1, 0.1, 0.0, 1.0), (2, 0.3, 0.5, 1.5), (2, 0.5, 0.9, 1.0)],
)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0])
def test_poisson_agrees_with_the_integral(
    steps: int, rate: float, correlation: float, sigma: float, epsilon: float
) -> None:
    exact = integral(poisson(steps, rate), correlation, sigma, epsilon)
    found = estimated(steps, rate, correlation, sigma).at(epsilon)
    assert found.low <= exact <= found.high
    assert found.delta == pytest.approx(exact, rel=0.25)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0])
def test_balls_in_bins_agree_with_the_integral(epsilon: float) -> None:
    exact = integral({(1, 0): 0.5, (0, 1): 0.5}, 0.6, 1.0, epsilon)
    found = PairCurve(BallsInBins(2, 2, 0.6), 1.0, 40_000, 0).at(epsilon)
    assert found.low <= exact <= found.high
    assert found.delta == pytest.approx(exact, rel=0.1)


@cache
def pld(steps: int, rate: float, sigma: float):  # type: ignore[no-untyped-def]
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    return accountant


@pytest.mark.slow
def test_intervals_cover() -> None:
    """At 99%, three misses of 24 happen once in 600 times."""
    exact = pld(20, 0.1, 1.0).get_delta(2.0)
    assert 1e-5 < exact < 1e-2
    curves = [PairCurve(Poisson(20, 0.1, 0.0), 1.0, 2000, seed).at(2.0) for seed in range(24)]
    missed = sum(not found.low <= exact <= found.high for found in curves)
    assert missed < 3
    spread = np.std([found.delta for found in curves])
    width = np.mean([found.high - found.low for found in curves])
    assert width == pytest.approx(2 * 2.807 * spread, rel=0.5)


def test_the_likelihood_is_the_mean_over_all_participations() -> None:
    steps, rate, correlation, sigma = 7, 0.3, 0.6, 1.3
    x = np.random.default_rng(3).normal(size=(50, steps))
    every = poisson(steps, rate)
    means = np.array(list(every)) @ encoder(steps, correlation).T
    exponent = (x @ means.T - (means**2).sum(axis=1) / 2) / sigma**2
    exact = logsumexp(exponent + np.log(list(every.values())), axis=1)
    of = Poisson(steps, rate, correlation)
    below = of._log_ratios(x, sigma, 1.0, 1, "down")[0]
    above = of._log_ratios(x, sigma, 1.0, 1, "up")[0]
    np.testing.assert_allclose((below + above) / 2, exact, atol=0.1)
    np.testing.assert_allclose(above, exact, atol=0.3)


def test_too_few_draws_are_said() -> None:
    curve = PairCurve(BallsInBins(10, 10, 0.3), 2.0, 2000, 0)
    with pytest.raises(TooFewDraws, match="raise draws"):
        curve.at(30.0)


def test_a_calibrated_noise_holds_on_other_draws() -> None:
    keys = {"steps": 10, "sampling_rate": 0.2, "correlation": 0.5, "sampling": "balls_in_bins"}
    noise = CorrelatedCalibration.model_validate({**keys, "draws": 5000}).calibrate(1.0, 1e-3)
    assert noise.noise_multiplier is not None
    tried = {**keys, "noise_multiplier": noise.noise_multiplier, "seed": 99, "draws": 20_000}
    curve = CorrelatedCurve.model_validate(tried)
    found = curve.delta(1.0)
    assert found.interval is not None and found.interval[0] <= 1e-3
    assert 0.7e-3 < found.delta <= 1.02e-3
    epsilon = curve.epsilon(1e-3)
    assert epsilon.interval is not None
    assert epsilon.interval[0] <= epsilon.epsilon <= epsilon.interval[1]
    assert epsilon.epsilon == pytest.approx(1.0, abs=0.06)
