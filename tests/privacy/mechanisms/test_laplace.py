"""Truncated Laplace noise: against the integral of the densities, and the paper's exact claim."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest

from fedsim.privacy.mechanisms import laplace


def reference(gap: float, scale: float, bound: float, epsilon: float) -> object:
    """The integral of the positive part of f(x) - exp(ε) f(x - gap)."""
    with mp.workdps(40 + int(bound / scale)):  # the ends have a density of exp(-bound / scale)
        gap, scale, bound = mp.mpf(gap), mp.mpf(scale), mp.mpf(bound)
        factor = mp.exp(mp.mpf(epsilon))
        mass = 2 * scale * -mp.expm1(-bound / scale)

        def density(x: object) -> object:
            return mp.exp(-abs(x) / scale) / mass if abs(x) <= bound else mp.mpf(0)

        def height(x: object) -> object:
            return max(density(x) - factor * density(x - gap), mp.mpf(0))

        turn = (gap - mp.mpf(epsilon) * scale) / 2
        ends = {-bound, bound, mp.mpf(0), gap - bound, gap, turn}
        return mp.quad(height, sorted(x for x in ends if -bound <= x <= bound))


@pytest.mark.parametrize(
    ("gap", "scale", "bound"),
    [(1, 1, 5), (1, 0.2, 3), (1, 3, 0.7), (1, 1, 0.6), (1e-6, 1, 10), (2, 0.1, 8), (1, 0.3, 0.9)],
)
def test_it_agrees_with_the_integral(gap: float, scale: float, bound: float) -> None:
    for share in (0.0, 0.3, 0.999, 1.0, 1.7):
        epsilon = share * gap / scale
        found = float(laplace.log_delta(gap, scale, bound, epsilon))
        expected = reference(gap, scale, bound, epsilon)
        assert abs(mp.expm1(found - mp.log(expected))) < 1e-10  # type: ignore[arg-type]


def test_the_papers_bound_is_exact_for_one_number() -> None:
    epsilon = np.array([1e-3, 0.5, 1.0, 8.0, 700.0])[:, None]
    delta = np.array([1e-200, 1e-9, 1e-3, 0.2])
    bound = laplace.bound(2.0, epsilon, delta)
    found = laplace.log_delta(2.0, 2.0 / epsilon, bound, epsilon)
    small = bound > 1.0  # else the noise is shorter than half the sensitivity
    expected = np.broadcast_to(np.log(delta), found.shape)
    assert small[:, :2].all()
    assert np.allclose(found[small], expected[small], rtol=1e-10, atol=1e-9)


def test_laws_and_the_inverse() -> None:
    curve = laplace.log_delta(1.0, 1.0, 6.0, np.linspace(0, 0.99, 20))
    assert (np.diff(curve) < 0).all()
    last = float(laplace.log_delta(1.0, 1.0, 6.0, 1.0))
    assert float(laplace.log_delta(1.0, 1.0, 6.0, 9.0)) == pytest.approx(last)
    for log_delta in (last + 1e-6, -3.0, -1.0):
        epsilon = laplace.epsilon(1.0, 1.0, 6.0, math.exp(log_delta))
        again = float(laplace.log_delta(1.0, 1.0, 6.0, epsilon))
        assert again == pytest.approx(log_delta, abs=1e-9)
    assert laplace.epsilon(1.0, 1.0, 6.0, math.exp(last - 0.1)) == math.inf
    assert np.exp(laplace.log_delta(1.0, 1.0, 0.5, 3.0)) == 1.0


def test_its_standard_deviation_is_that_of_the_density() -> None:
    for scale, bound in ((1.0, 5.0), (2.0, 0.3)):
        mass = mp.quad(lambda x, b=scale: mp.exp(-x / b), [0, bound])
        square = mp.quad(lambda x, b=scale: x * x * mp.exp(-x / b), [0, bound])
        assert laplace.std(scale, bound) == pytest.approx(float(mp.sqrt(square / mass)), rel=1e-12)


def test_two_numbers_need_the_l1_sensitivity() -> None:
    """The paper's noise on each of two numbers that both change is not (ε, δ)-private."""
    bound = float(laplace.bound(1.0, 1.0, 1e-3))
    # Of the product, the first coordinate alone already has δ = 1e-3 at ε = 1; both: at ε = 1
    # the part where either falls outside of the other's reach counts once more.
    outside = math.exp(float(laplace.log_delta(1.0, 1.0, bound, 1.0)))
    either = 1 - (1 - outside) ** 2
    assert either > 1.9e-3
