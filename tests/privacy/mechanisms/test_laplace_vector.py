"""Truncated Laplace noise on a vector: what is proven is never below the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import fftconvolve

from fedsim.privacy.mechanisms import laplace, laplace_vector

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
    proven = np.exp(laplace_vector.log_delta(length, scale, bound, len(moves), EPSILONS))
    exact = truth(moves, scale, bound, EPSILONS)
    assert (exact <= proven + 1e-3).all()  # the grid of losses
    lost = laplace_vector.outside(length, scale, bound, len(moves))
    if sum(moves) <= EPSILONS[-1] * scale:  # there nothing but the ends of the noise tells
        assert exact[-1] <= lost + 1e-3


def test_of_one_number_the_end_is_exact() -> None:
    """From ε = β / b on nothing but the noise's ends tells the neighbours apart."""
    found = float(laplace_vector.log_delta(1.0, 2.0, 9.0, 1, 0.6))
    assert found == pytest.approx(float(laplace.log_delta(1.0, 2.0, 9.0, 0.6)), rel=1e-9)
    curve = laplace_vector.log_delta(1.0, 2.0, 9.0, 1, np.linspace(0, 0.5, 9))
    assert (curve >= laplace.log_delta(1.0, 2.0, 9.0, np.linspace(0, 0.5, 9)) - 1e-9).all()


def test_many_entries_are_a_gaussian_mechanism() -> None:
    """What is proven does not grow with the dimension, but for the ends."""
    few, many = (
        np.exp(laplace_vector.log_delta(1.0, 3.0, 90.0, d, EPSILONS[:5])) for d in (50, 5000)
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
    found = float(laplace_vector.log_delta(0.2, *noise, dimension, epsilon))
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
