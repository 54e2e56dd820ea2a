"""Rates and limits of recovering features: laws, and attacks that must not exceed a limit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedsim.privacy.recovery import (
    chance_within,
    gaussian_information,
    tensor_rate,
)

BASE = {"width": 16384, "dimension": 512, "images": 4, "classes": 10}


def test_the_rate_follows_the_papers_laws() -> None:
    """Section 3: root of d / m, linear in B and K; clipping alone is harmless, dropout narrows."""
    rate = tensor_rate(**BASE)
    assert tensor_rate(**{**BASE, "width": 4 * 16384}) == pytest.approx(rate / 2)
    assert tensor_rate(**{**BASE, "dimension": 2048}) == pytest.approx(2 * rate)
    assert tensor_rate(**{**BASE, "images": 12}) == pytest.approx(3 * rate)
    assert tensor_rate(**BASE, clipped=7.0) == rate
    assert tensor_rate(**BASE, noise=4.0) == pytest.approx(2 * rate)
    assert tensor_rate(**BASE, noise=4.0, clipped=3.0) == pytest.approx(4 * rate)
    assert tensor_rate(**BASE, kept=0.25) == pytest.approx(2 * rate)


@pytest.mark.parametrize("error", [0.1, 0.5, 0.9])
def test_the_share_of_the_sphere_is_that_of_random_directions(error: float) -> None:
    """In three dimensions a double cap of sine s has the share 1 - sqrt(1 - s²)."""
    share = 1 - math.sqrt(1 - error**2)
    expected = min(1.0, math.log(2) / -math.log(share))
    assert chance_within(error, 0.0, 3) == pytest.approx(expected)


@pytest.mark.parametrize("std", [0.1, 1.0])
@pytest.mark.parametrize("dimension", [3, 64])
def test_the_best_estimator_does_not_exceed_the_limit(std: float, dimension: int) -> None:
    """A unit vector seen through noise: its most likely direction is the observation's own."""
    stream = torch.Generator().manual_seed(dimension)
    truth = F.normalize(torch.randn(20_000, dimension, generator=stream), dim=1)
    seen = truth + std * torch.randn(truth.shape, generator=stream)
    sine = (1 - F.cosine_similarity(truth, seen).square()).clamp(min=0).sqrt()
    information = gaussian_information(1.0, std)
    for error in (0.1, 0.3, 0.6, 0.9):
        share = float((sine <= error).double().mean())
        assert share <= chance_within(error, information, dimension) + 0.01


def test_limits_grow_with_information_and_fall_with_the_dimension() -> None:
    chances = [chance_within(0.5, nats, 64) for nats in (0.1, 1.0, 5.0, 20.0, 100.0)]
    assert chances == sorted(chances)
    assert chances[0] < chances[-1] == 1.0
    assert chance_within(0.5, 1.0, 128) < chance_within(0.5, 1.0, 64)
    assert chance_within(0.01, 1.0, 10_000) == 0.0
