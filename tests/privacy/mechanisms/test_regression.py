"""δ of sketched least squares against mpmath by two methods, its limits, and raw matrices."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from ndis_figures import als_law
from ndis_reference import regression_terms, two_groups
from scipy.stats import f as f_distribution
from scipy.stats import kstest

from fedsim.privacy.mechanisms import least_squares, normal, projection
from fedsim.types import FedsimError

WAYS = ("forward", "reverse")
POINTS = [
    (0.02, 0.05, 300, 12, 1.0),
    (0.01, 0.0199, 1000, 12, 0.5),  # q = 2 p - p²: the first group has hardly a square
    (0.3, 0.9, 4, 3, 2.0),
    (1e-4, 0.2, 50, 1, 0.1),
    (0.2, 0.2001, 900, 5, 0.5),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_it_agrees_with_high_precision(
    point: tuple[float, float, int, int, float], way: str
) -> None:
    p, q, r, d, epsilon = point
    with mp.workdps(20):
        a1, a2, b1, c = regression_terms(p, q, r, d, epsilon, way == "reverse")
        expected = two_groups(a1, a2, b1, c, d - 1)
        found = float(least_squares.log_delta(p, q, r, d, epsilon, way))  # type: ignore[arg-type]
        assert abs(mp.expm1(found - mp.log(expected))) < 1e-10


def test_the_limits_are_random_projections() -> None:
    q = 10.0 ** -np.arange(0.1, 9, 0.8)
    for way, other in (WAYS, WAYS[::-1]):
        for epsilon in (0.0, 1e-3, 0.2, 5.0):
            keys = {"r": 50, "d": 7, "epsilon": epsilon, "direction": way}
            no_residual = least_squares.log_delta(q, q, **keys)  # type: ignore[arg-type]
            linear = projection.log_delta(q, 1, epsilon, other)  # type: ignore[arg-type]
            assert np.allclose(no_residual, linear, rtol=1e-11, atol=1e-10)
            no_leverage = least_squares.log_delta(0.0, q, **keys)  # type: ignore[arg-type]
            wide = projection.log_delta(q, 7, epsilon, way)  # type: ignore[arg-type]
            assert np.allclose(no_leverage, wide, rtol=1e-11, atol=1e-10)


def test_it_is_that_of_the_two_normal_releases() -> None:
    """Lemma 1's distributions of a data set with and without a row, as normals of any kind."""
    stream = np.random.default_rng(3)
    rows, d, r = 12, 3, 40
    features, target = stream.normal(size=(rows, d)), stream.normal(size=rows)

    def release(b: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        solution, residual, *_ = np.linalg.lstsq(b, y, rcond=None)
        return solution, float(residual[0]) * np.linalg.inv(b.T @ b) / r

    def leverage(b: np.ndarray) -> float:
        return float(b[0] @ np.linalg.solve(b.T @ b, b[0]))

    p, q = leverage(features), leverage(np.column_stack([features, target]))
    present, absent = release(features, target), release(features[1:], target[1:])
    for epsilon in (0.0, 0.5, 2.0):
        for way, pair in (
            ("forward", normal.pair(*present, *absent)),
            ("reverse", normal.pair(*absent, *present)),
        ):
            found = least_squares.log_delta(p, q, r, d, epsilon, way)  # type: ignore[arg-type]
            assert float(found) == pytest.approx(float(pair.log_delta(epsilon)), rel=1e-9)


def test_nothing_is_lost_over_the_whole_range() -> None:
    stream = np.random.default_rng(0)
    q = np.concatenate([10 ** stream.uniform(-15, 0, 300), 1 - 10 ** stream.uniform(-12, 0, 100)])
    p = q * stream.random(400) ** stream.integers(1, 9, 400)
    r, d = 10 ** stream.uniform(0, 6, 400), np.round(10 ** stream.uniform(0, 3, 400))
    epsilon = np.where(stream.random(400) < 0.2, 0.0, 10 ** stream.uniform(-9, 1, 400))
    for way in WAYS:
        found = least_squares.log_delta(p, q, r, d, epsilon, way)  # type: ignore[arg-type]
        assert not np.isnan(found).any()
        assert (found <= 0).all()
    assert np.exp(least_squares.log_delta(0.3, 1.0, 10, 2, 5.0)) == 1.0
    assert np.exp(least_squares.log_delta(0.0, 0.0, 10, 2, 0.0)) == 0.0


@pytest.mark.parametrize(
    ("leverage", "residual", "r", "d", "epsilon"),
    [
        (0.1, 1.0, 1000, 10, 1.0),
        (0.3, 1.0, 20, 2, 3.0),
        (0.04, 1.0, 300, 12, 1.0),
        (0.05, 0.004, 300, 12, 1.0),
    ],
)
def test_the_worst_row_is_not_beaten_by_any_other(
    leverage: float, residual: float, r: int, d: int, epsilon: float
) -> None:
    draw = np.random.default_rng(1)
    found = least_squares._worst(leverage, r, d, epsilon, residual)
    assert 0 <= found.p <= found.q <= leverage
    assert found.q - found.p <= residual * (1 + 1e-12)
    q = leverage * np.sqrt(draw.random(3000))
    p = np.maximum(0.0, q - np.minimum(residual, q) * draw.random(3000))
    assert least_squares.log_delta(p, q, r, d, epsilon).max() <= found.log_delta + 1e-9
    at = float(least_squares.log_delta(found.p, found.q, r, d, epsilon, found.direction))
    assert at == pytest.approx(found.log_delta)
    if residual < leverage:
        every = least_squares._worst(leverage, r, d, epsilon)
        assert found.log_delta < every.log_delta - 0.1


def test_the_noise_is_the_least_that_keeps_every_row_private() -> None:
    sigma = least_squares.sigma(1.0, 100, 5, 1.0, 1e-4)
    worst = least_squares._worst(1 / (1 + sigma**2), 100, 5, 1.0)
    assert worst.log_delta == pytest.approx(math.log(1e-4), rel=1e-9)
    weaker = least_squares._worst(1 / (1 + (0.99 * sigma) ** 2), 100, 5, 1.0)
    assert weaker.log_delta > math.log(1e-4)


@pytest.mark.slow
def test_a_declared_residual_makes_noise_needless_and_else_counts_for_nothing() -> None:
    keys = {"row_norm": 1.5, "r": 300, "d": 12, "leverage": 0.02}
    calibrate = least_squares._LeastSquaresCalibration.model_validate
    bare = calibrate({**keys, "residual": 0.001})
    assert bare.calibrate(1.0, 1e-3).sigma == 0.0
    assert "no DP" in bare.neighbours()
    some = calibrate({**keys, "leverage": 0.05, "residual": 0.04}).calibrate(1.0, 1e-4)
    more = calibrate({**keys, "leverage": 0.05}).calibrate(1.0, 1e-4)
    every = calibrate({**keys, "leverage": 1.0}).calibrate(1.0, 1e-4)
    assert some.sigma == more.sigma and 0 < more.sigma < every.sigma  # type: ignore[operator]
    with pytest.raises(FedsimError, match="tight"):
        calibrate({**keys, "variant": "paper"}).calibrate(1.0, 1e-3)


def test_approximate_least_squares_is_a_multivariate_t() -> None:
    """At any number of columns; the paper has the limit, and calls the rest open (section 6.3)."""
    draw, rows, columns, count = np.random.default_rng(4), 40, 14, 20_000
    whole = draw.standard_normal((rows, 4))
    law = als_law(whole.T @ whole, columns)
    sketches = draw.standard_normal((count, columns, rows)) @ whole
    features, target = sketches[..., :-1], sketches[..., -1:]
    turned = features.transpose(0, 2, 1)
    found = np.linalg.solve(turned @ features, turned @ target)[..., 0]
    away = found - law.loc
    squares = np.einsum("ni,ij,nj->n", away, np.linalg.inv(law.shape), away) / 3
    assert kstest(squares, f_distribution(3, columns - 3 + 1).cdf).pvalue > 0.001
    # Every direction is as likely once the shape is taken off.
    white = away @ np.linalg.cholesky(np.linalg.inv(law.shape))
    signs = (white > 0).mean(0)
    assert np.abs(signs - 0.5).max() < 4 * 0.5 / math.sqrt(count)
    spread = np.cov(white.T) / np.trace(np.cov(white.T)) * 3
    assert np.abs(spread - np.eye(3)).max() < 0.1
