"""Correlated noise: sensitivity, the deterministic accountants, and the calculator's mechanism."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import binom, norm

from fedsim.privacy.composition import correlated
from fedsim.privacy.composition.correlated import _squared_norms, grid
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCalibration, CorrelatedCurve

LAMBDAS = [0.0, 0.3, 0.7, 0.95]


def encoder(steps: int, correlation: float) -> np.ndarray:
    """C as the inverse of the matrix that correlates the noise: ξ_t = z_t - λ z_(t-1)."""
    return np.linalg.inv(np.eye(steps) - correlation * np.eye(steps, k=-1))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, written down as it stands."""
    if mu == 0:
        return 0.0
    upper = norm.cdf(mu / 2 - epsilon / mu)
    return float(upper - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("correlation", LAMBDAS)
def test_no_subset_of_steps_reaches_farther_than_the_first_ones(correlation: float) -> None:
    steps = 8
    matrix = encoder(steps, correlation)
    for size in range(1, steps + 1):
        reached = [
            float(np.linalg.norm(matrix[:, list(chosen)].sum(axis=1)))
            for chosen in itertools.combinations(range(steps), size)
        ]
        assert max(reached) == pytest.approx(correlated.sensitivity(steps, correlation, size))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_the_norms_are_those_of_all_participations_rounded_up(
    correlation: float, rate: float
) -> None:
    steps = 11
    every = np.array(list(itertools.product([0, 1], repeat=steps)))
    weight = np.prod(np.where(every == 1, rate, 1 - rate), axis=1)
    exact = ((every @ encoder(steps, correlation).T) ** 2).sum(axis=1)
    values, weights, rest = _squared_norms(steps, rate, correlation)
    assert weights.sum() + rest == pytest.approx(1, abs=1e-9)
    assert rest <= 1e-12
    for bound in np.quantile(exact, [0.0, 0.1, 0.5, 0.9]) + 1e-6:
        above = float(weights[values > bound].sum())
        assert above >= float(weight[exact > bound].sum()) - 1e-9
    mean, exact_mean = float(weights @ values), float(weight @ exact)
    assert exact_mean * (1 - 1e-9) <= mean <= exact_mean * (1.0001 if correlation == 0 else 1.2)


@pytest.mark.parametrize("rounding", ["up", "down"])
def test_a_grid_holds_participations_on_its_side(rounding: str) -> None:
    along = grid(0.7, 0.01, 0.02, rounding)  # type: ignore[arg-type]
    draw = np.random.default_rng(1)
    exact, at = 0.0, 0
    for present in draw.random(3000) < 0.2:
        exact = 0.7 * exact + present
        at = along.present[at] if present else along.absent[at]
        level = along.levels[at]
        assert level >= exact * (1 - 1e-9) if rounding == "up" else level <= exact * (1 + 1e-9)
        assert abs(level - exact) <= 0.07 * exact + 0.02


def revealed(epsilon: float, *, correlation: float = 0.0, noise: float = 3.0, **changes: object):  # type: ignore[no-untyped-def]
    keys = {
        "steps": 40,
        "sampling_rate": 0.1,
        "correlation": correlation,
        "noise_multiplier": noise,
        "sampling": "fixed_size",
    }
    return CorrelatedCurve.model_validate({**keys, **changes}).delta(epsilon).delta


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_fixed_size_without_correlation_is_the_mean_over_a_binomial(epsilon: float) -> None:
    expected = sum(
        binom.pmf(k, 40, 0.1) * gaussian_delta(math.sqrt(k) / 3.0, epsilon) for k in range(41)
    )
    assert expected <= revealed(epsilon) * (1 + 1e-9)
    assert revealed(epsilon) == pytest.approx(expected, rel=0.05)


def test_a_replaced_example_reaches_twice_as_far() -> None:
    for sampling in ("full", "single_epoch"):
        twice = revealed(0.7, noise=6.0, correlation=0.5, sampling=sampling, relation="replace_one")
        assert twice == pytest.approx(revealed(0.7, correlation=0.5, sampling=sampling), rel=1e-9)


def mixture(means: list[float], weights: list[float], sigma: float, x: np.ndarray) -> np.ndarray:
    laws = [np.exp(-((x - mean) ** 2) / (2 * sigma**2)) for mean in means]
    return np.asarray(np.tensordot(weights, laws, 1) / (sigma * math.sqrt(2 * math.pi)))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_one_fixed_size_batch_is_as_private_as_its_worst_case(epsilon: float, rate: float) -> None:
    """All others at -1, the example at +1 or at -1: what is claimed is attained."""
    sigma, x = 1.3, np.linspace(-15, 15, 300_001)
    p, q = (mixture([to, -1.0], [rate, 1 - rate], sigma, x) for to in (1.0, -1.0))
    exact = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (x[1] - x[0])
    shape: dict[str, Any] = {"steps": 1, "sampling_rate": rate, "noise": sigma}
    shape["relation"] = "replace_one"
    assert revealed(epsilon, **shape) == pytest.approx(float(exact), rel=1e-6)
    known = rate * gaussian_delta(2 / sigma, epsilon)
    assert revealed(epsilon, **shape) < known * (1 - 1e-3) or epsilon == 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_no_two_fixed_size_batches_are_less_private_than_claimed(epsilon: float) -> None:
    """Two correlated steps, the same worst case, integrated over both releases."""
    rate, sigma, correlation = 0.3, 1.1, 0.5
    x = np.linspace(-9, 14, 1201)
    first, second = np.meshgrid(x, x, indexing="ij")

    def law(reach: float) -> np.ndarray:
        total = np.zeros_like(first)
        for z in ((0, 0), (0, 1), (1, 0), (1, 1)):
            weight = math.prod(rate if each else 1 - rate for each in z)
            at = encoder(2, correlation) @ (reach * np.array(z))
            density = np.exp(-((first - at[0]) ** 2 + (second - at[1]) ** 2) / (2 * sigma**2))
            total += weight * density / (2 * math.pi * sigma**2)
        return total

    p, q, area = law(2.0), law(0.0), (x[1] - x[0]) ** 2
    exact = max(
        float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * area)
        for one, other in ((p, q), (q, p))
    )
    shape: dict[str, Any] = {"steps": 2, "sampling_rate": rate, "noise": sigma}
    shape["correlation"] = correlation
    claimed = revealed(epsilon, **shape, relation="replace_one")
    assert exact * (1 - 1e-6) <= claimed < 2 * exact
    twice = revealed(epsilon, **{**shape, "noise": sigma / 2})  # of known batches
    assert claimed < twice * (1 - 1e-3) or epsilon == 0


@pytest.mark.parametrize("sampling", ["full", "single_epoch", "fixed_size"])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_calibration_is_the_curve_turned_around(sampling: str, correlation: float) -> None:
    keys = {"steps": 30, "sampling_rate": 0.1, "correlation": correlation, "sampling": sampling}
    noise = CorrelatedCalibration.model_validate(keys).calibrate(0.8, 1e-4).noise_multiplier
    assert noise is not None
    at = CorrelatedCurve.model_validate({**keys, "noise_multiplier": noise})
    assert at.delta(0.8).delta == pytest.approx(1e-4, rel=1e-4)
    assert at.epsilon(1e-4).epsilon == pytest.approx(0.8, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"correlation": 1.0}, "correlation"),
        ({"correlation": -0.1}, "correlation"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
        ({"sampling": "balls_in_bins", "sampling_rate": 0.3}, "whole"),
        ({"sampling": "poisson", "relation": "replace_one"}, "replace_one"),
        ({"sampling": "balls_in_bins", "relation": "replace_one"}, "replace_one"),
        ({"sampling": "full", "relation": "add_or_remove"}, "add_or_remove"),
        ({"relation": "add_or_remove"}, "add_or_remove"),
        ({"sampling": "full", "variant": "paper"}, "fixed_size"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, object], word: str) -> None:
    keys = {"steps": 10, "sampling_rate": 0.1, "sampling": "fixed_size", "noise_multiplier": 1.0}
    with pytest.raises(ValidationError, match=word):
        CorrelatedCurve.model_validate({**keys, **changes})
