"""Truncated Laplace noise: against the integral of the densities, and the paper's exact claim."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from scipy.signal import fftconvolve

from fedsim.privacy.mechanisms import laplace, laplace_vector


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
        found = float(laplace._log_delta(gap, scale, bound, epsilon))
        expected = reference(gap, scale, bound, epsilon)
        assert abs(mp.expm1(found - mp.log(expected))) < 1e-10  # type: ignore[arg-type]


def test_the_papers_bound_is_exact_for_one_number() -> None:
    epsilon = np.array([1e-3, 0.5, 1.0, 8.0, 700.0])[:, None]
    delta = np.array([1e-200, 1e-9, 1e-3, 0.2])
    bound = laplace.bound(2.0, epsilon, delta)
    found = laplace._log_delta(2.0, 2.0 / epsilon, bound, epsilon)
    small = bound > 1.0  # else the noise is shorter than half the sensitivity
    expected = np.broadcast_to(np.log(delta), found.shape)
    assert small[:, :2].all()
    assert np.allclose(found[small], expected[small], rtol=1e-10, atol=1e-9)


def test_laws_and_the_inverse() -> None:
    curve = laplace._log_delta(1.0, 1.0, 6.0, np.linspace(0, 0.99, 20))
    assert (np.diff(curve) < 0).all()
    last = float(laplace._log_delta(1.0, 1.0, 6.0, 1.0))
    assert float(laplace._log_delta(1.0, 1.0, 6.0, 9.0)) == pytest.approx(last)
    for log_delta in (last + 1e-6, -3.0, -1.0):
        epsilon = laplace._epsilon(1.0, 1.0, 6.0, math.exp(log_delta))
        again = float(laplace._log_delta(1.0, 1.0, 6.0, epsilon))
        assert again == pytest.approx(log_delta, abs=1e-9)
    assert laplace._epsilon(1.0, 1.0, 6.0, math.exp(last - 0.1)) == math.inf
    assert np.exp(laplace._log_delta(1.0, 1.0, 0.5, 3.0)) == 1.0


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
    outside = math.exp(float(laplace._log_delta(1.0, 1.0, bound, 1.0)))
    either = 1 - (1 - outside) ** 2
    assert either > 1.9e-3


EPSILONS = np.linspace(0.0, 3.0, 13)


def truth(moves: list[float], scale: float, bound: float, epsilons: np.ndarray) -> np.ndarray:
    """δ at each ε of noise on several entries, by convolving the distributions of their losses."""
    step, kept = 1e-4, 1.0
    masses, lowest = np.array([1.0]), 0
    for move in moves:
        edges = np.linspace(-bound, bound, 200_001)
        x = (edges[1:] + edges[:-1]) / 2
        density = np.exp(-np.abs(x) / scale)
        density /= density.sum()
        inside = np.abs(x - move) <= bound
        index = np.round((np.abs(x - move) - np.abs(x))[inside] / scale / step).astype(int)
        kept *= density[inside].sum()
        masses = fftconvolve(masses, np.bincount(index - index.min(), density[inside]))
        lowest += int(index.min())
    losses = (lowest + np.arange(len(masses))) * step
    gaps = -np.expm1(np.minimum(epsilons[:, None] - losses[None], 0.0))
    return 1 - kept + (masses * gaps).sum(1)


@pytest.mark.parametrize("moves", [[1.0], [0.6, 0.8], [0.5] * 4, [0.9, 0.3, 0.3, 0.1], [0.25] * 16])
@pytest.mark.parametrize(("scale", "bound"), [(2.0, 20.0), (0.7, 6.0)])
def test_no_direction_is_worse_than_what_is_proven(
    moves: list[float], scale: float, bound: float
) -> None:
    length = math.sqrt(sum(move**2 for move in moves))
    proven = np.exp(laplace_vector._log_delta(length, scale, bound, len(moves), EPSILONS))
    exact = truth(moves, scale, bound, EPSILONS)
    assert (exact <= proven + 1e-3).all()  # the grid of losses
    lost = laplace_vector._outside(length, scale, bound, len(moves))
    if sum(moves) <= EPSILONS[-1] * scale:  # there nothing but the ends of the noise tells
        assert exact[-1] <= lost + 1e-3


def test_of_one_number_the_end_is_exact() -> None:
    """From ε = β / b on nothing but the noise's ends tells the neighbours apart."""
    found = float(laplace_vector._log_delta(1.0, 2.0, 9.0, 1, 0.6))
    assert found == pytest.approx(float(laplace._log_delta(1.0, 2.0, 9.0, 0.6)), rel=1e-9)
    curve = laplace_vector._log_delta(1.0, 2.0, 9.0, 1, np.linspace(0, 0.5, 9))
    assert (curve >= laplace._log_delta(1.0, 2.0, 9.0, np.linspace(0, 0.5, 9)) - 1e-9).all()


def test_many_entries_are_a_gaussian_mechanism() -> None:
    """What is proven does not grow with the dimension, but for the ends."""
    few, many = (
        np.exp(laplace_vector._log_delta(1.0, 3.0, 90.0, d, EPSILONS[:5])) for d in (50, 5000)
    )
    assert np.allclose(few, many, rtol=1e-6, atol=1e-12)
    # In the middle it is the truth to within the constant sqrt(π/2): that of many small entries.
    exact = truth([0.25] * 16, 3.0, 90.0, np.array([0.0]))[0]
    assert exact < few[0] < 1.3 * exact


@pytest.mark.parametrize("calibration", ["tight", "paper"])
@pytest.mark.parametrize("dimension", [1, 3, 64, 512])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-6), (2.0, 1e-3), (9.0, 1e-4)])
def test_calibrated_noise_is_enough(
    calibration: laplace_vector.ScaleChoice, dimension: int, epsilon: float, delta: float
) -> None:
    noise = laplace_vector.calibrate_noise(0.2, dimension, epsilon, delta, calibration)
    found = float(laplace_vector._log_delta(0.2, *noise, dimension, epsilon))
    assert found <= math.log(delta) + 1e-9
    if calibration == "tight":
        assert found == pytest.approx(math.log(delta), abs=1e-6)
        paper = laplace_vector.calibrate_noise(0.2, dimension, epsilon, delta, "paper")
        assert noise[0] <= paper[0] * (1 + 1e-12)


def test_the_papers_scale_is_that_of_the_l1_sensitivity() -> None:
    scale, bound = laplace_vector.calibrate_noise(0.1, 64, 0.5, 1e-6, "paper")
    assert scale == pytest.approx(8 * 0.1 / 0.5)
    assert bound == pytest.approx(float(laplace.bound(0.8, 0.5, 1e-6)))
    # 512 features: the paper's noise is 4.5 times what is proven to be enough.
    tight, paper = (
        laplace_vector.calibrate_noise(1.0, 512, 0.5, 1e-6, calibration)[0]
        for calibration in ("tight", "paper")
    )
    assert paper / tight == pytest.approx(4.456, abs=0.01)
