"""Table 2 of Liu et al., Data Reconstruction Attacks and Defenses, against its own estimator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim_attacks.head_features.tensor_features import (
    derivative_moments,
    inverse_root,
    power_method,
    second_moment,
)

DIMENSION, CLASSES, WIDTH = 512, 10, 16384
REPORTED = 0.171
"""Span error of one image without a defense, under ReLU with at most `WIDTH` planted neurons."""


def plant(neurons: int, seed: int) -> Tensor:
    stream = rng.generator(seed, "paper", neurons)
    return torch.randn(neurons, DIMENSION, generator=stream)


def span_error(g: Tensor, w: Tensor, back: Tensor | None = None) -> float:
    """Of the feature e_1, from values g (m,) at the weights w (m, d)."""
    basis = power_method([second_moment(g, w).double()], 1, 50, rng.generator(0, "power"))[:, 0]
    found = basis if back is None else back @ basis
    return math.sqrt(1 - float(found[0] / found.norm()) ** 2)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_its_bound_does_not_cover_its_experiment(count: int) -> None:
    """Theorem B.1 without constants and logarithms, of unit features that are orthogonal."""
    curvature = derivative_moments("relu")[2]
    assert CLASSES**2 * count**2 * DIMENSION / curvature**2 / 19 > WIDTH  # m >= Ω(K² B² d / ν²)
    assert CLASSES / curvature * count * math.sqrt(DIMENSION / WIDTH) > 4  # of an error <= 1
    assert (CLASSES**2 * count**4 <= DIMENSION) == (count == 1)  # K² B⁴ <= O(d)


def test_the_plain_estimator_stays_far_above_its_table() -> None:
    """For one image it depends on nothing but d, m and the activation: no unit changes it."""
    w = plant(WIDTH, seed=0)
    g = w[:, 0].relu()
    error = span_error(g, w)
    assert error > 0.45
    assert span_error(38 * g, w) == pytest.approx(error, rel=1e-3)


def test_regression_and_whitening_reach_its_table() -> None:
    w = plant(WIDTH, seed=0)
    g = w[:, 0].relu()
    design = torch.cat([torch.ones(WIDTH, 1), w], 1)
    g = g - design @ torch.linalg.solve(design.T @ design, design.T @ g)
    assert 0.2 < span_error(g, w) < 0.28
    back = inverse_root((w.T @ w / WIDTH).double())
    assert span_error(g, w @ back.float(), back) < REPORTED + 0.005
