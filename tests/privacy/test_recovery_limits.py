"""Limits of any attack: the best ones must not pass them, and the best possible meet them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedsim.contracts.metric import bound_chances
from fedsim.privacy.membership import tpr_limit
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.recovery import (
    _activation_moment,
    chance_within,
    describe,
    gaussian_information,
    gaussian_success_limit,
    least_direction_error,
    least_normal_error,
    mean_limit,
    recovery,
    success_limit,
    tensor_bound,
    tensor_rate,
    van_trees,
)
from fedsim.types import FedsimError


def test_the_posterior_mean_of_a_normal_prior_meets_van_trees() -> None:
    stream = np.random.default_rng(0)
    jacobian, scale = stream.standard_normal((5, 4)), np.array([0.5, 1.0, 1.5, 2.0])
    fisher, prior = jacobian.T @ jacobian / 0.49, np.diag(scale**-2)
    x = scale * stream.standard_normal((20_000, 4))
    seen = x @ jacobian.T + 0.7 * stream.standard_normal((20_000, 5))
    best = seen @ np.linalg.solve(fisher + prior, jacobian.T / 0.49).T
    least = van_trees(fisher, prior)
    assert ((best - x) ** 2).sum(1).mean() == pytest.approx(least, rel=0.03)
    for factor in (0.0, 0.7, 1.2):
        assert ((factor * best - x) ** 2).sum(1).mean() > least


def test_information_bounds_the_error_where_it_is_known_exactly() -> None:
    """One normal entry behind noise: the distortion-rate function is met."""
    for ratio in (0.1, 1.0, 30.0):
        exact = math.log1p(ratio) / 2
        assert least_normal_error([2.0], exact) == pytest.approx(2 / (1 + ratio))
        # The energy bounds the information, and so the error, from the safe side.
        assert least_normal_error([2.0], ratio / 2) <= 2 / (1 + ratio) + 1e-12
    # Small entries are given up first: what fills them is their whole variance.
    assert least_normal_error([1.0, 1e-6], 1.0) == pytest.approx(math.exp(-2) + 1e-6)
    assert least_normal_error([1.0, 0.0], 0.0) == 1.0


@pytest.mark.parametrize(("count", "distance"), [(2, 1.0), (50, 2.0), (400, 3.5)])
def test_the_most_likely_candidate_does_not_pass_the_limit(count: int, distance: float) -> None:
    stream = np.random.default_rng(count)
    points = np.eye(count)
    truth = stream.integers(count, size=4000)
    seen = points[truth] + stream.standard_normal((4000, count)) / distance
    share = float((seen.argmax(1) == truth).mean())
    limit = gaussian_success_limit(1 / count, distance)
    assert 1 / count < share <= limit + 0.02
    deltas = (1e-5, 1e-3, 0.01, 0.05, 0.2, 0.5)
    curve = [(float(gaussian.epsilon(1 / distance, delta)), delta) for delta in deltas]
    # The envelope of claims is no lower than the curve that they are taken from.
    assert limit - 1e-9 <= success_limit(1 / count, curve) < limit + 0.2


def test_claims_bound_success_by_the_tightest() -> None:
    assert success_limit(0.01, []) == 1.0
    assert success_limit(0.01, [(math.inf, 1e-5)]) == 1.0
    assert success_limit(0.01, [(1.0, 1e-5), (0.5, 0.02)]) == min(
        tpr_limit(1.0, 1e-5, 0.01), tpr_limit(0.5, 0.02, 0.01)
    )
    # A release that tells all with chance δ reaches what δ allows.
    assert success_limit(0.01, [(0.0, 0.05)]) == pytest.approx(0.06)


def test_no_answer_has_more_candidates_near_than_the_chances_say() -> None:
    points = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)).double()
    radii = [0.0, 0.05, 0.2, 0.5, 2.0]
    chances = bound_chances(torch.cdist(points, points), radii)
    answers = torch.rand(2000, 2, generator=torch.Generator().manual_seed(1)).double() * 1.4 - 0.2
    near = torch.cdist(torch.cat([answers, points]), points)
    for radius, chance in zip(radii, chances, strict=True):
        assert float((near <= radius).double().mean(1).max()) <= chance
    assert chances[0] == pytest.approx(1 / 60) and chances[-1] == 1.0
    # Whoever knows the label has an answer for each.
    halves = bound_chances(torch.cdist(points, points), radii, torch.arange(60) % 2)
    assert halves[0] == pytest.approx(2 / 60)
    assert all(known >= blind / 2 for known, blind in zip(halves, chances, strict=True))


def test_mean_of_a_score_is_bounded_by_its_levels() -> None:
    levels, chances = [0.0, 1.0, 2.0, 4.0], [1.0, 0.5, 0.25, 0.0]
    assert mean_limit(levels, chances, lambda chance: chance) == 1.0 + 0.5 + 0.5
    assert mean_limit(levels, chances, lambda _: 1.0) == 4.0
    assert mean_limit([-1.0, 1.0], [0.0, 0.0], lambda chance: chance) == -1.0


def test_directions_behind_noise_are_no_closer_than_the_limit() -> None:
    stream = np.random.default_rng(3)
    for dimension, distance in ((3, 1.0), (64, 6.0)):
        truth = stream.standard_normal((4000, dimension))
        truth /= np.linalg.norm(truth, axis=1, keepdims=True)
        seen = truth + stream.standard_normal(truth.shape) / distance
        cosine = (seen * truth).sum(1) / np.linalg.norm(seen, axis=1)
        success = partial(gaussian_success_limit, distance=distance)
        least = least_direction_error(dimension, success)
        assert 0 < least < float(np.sqrt(1 - cosine**2).mean())
        assert least_direction_error(dimension, success, answers=9) < least


def test_the_span_of_several_answers_is_no_closer_than_the_limit() -> None:
    stream, dimension, distance = np.random.default_rng(4), 16, 2.0
    sines, near = [], 0
    for _ in range(1000):
        truth = stream.standard_normal(dimension)
        truth /= np.linalg.norm(truth)
        answers = stream.standard_normal((dimension, 8))
        answers[:, 0] += distance * truth
        basis = np.linalg.qr(answers)[0]
        sines.append(math.sqrt(1 - ((basis.T @ truth) ** 2).sum()))
        # Seven more answers that are drawn at random add to a span what they add to no answer.
        alone = answers[:, 0] / np.linalg.norm(answers[:, 0])
        near += sines[-1] < math.sqrt(1 - (alone @ truth) ** 2)
    found = recovery(
        {"width": 64, "dimension": 16, "images": 8, "steps": 1, "noise_multiplier": 0.5}
    )
    (private,) = [each for each in found if each.lower is not None]
    assert near == 1000
    assert private.lower is not None and 0 < private.lower < float(np.mean(sines))
    assert least_direction_error(8, lambda chance: chance, answers=8) == 0.0


def test_moments_of_activations_are_those_of_their_derivatives() -> None:
    assert _activation_moment("relu") == pytest.approx(1 / math.sqrt(2 * math.pi))
    # tanh is odd: its second derivative has mean 0, and the third decides, -2 + 8 t² - 6 t⁴.
    z = np.linspace(-12, 12, 200_001)
    t, weight = np.tanh(z), np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    third = float(((-2 + 8 * t**2 - 6 * t**4) * weight).sum() * (z[1] - z[0]))
    assert _activation_moment("tanh") == pytest.approx(abs(third), rel=1e-6)


SIZE: dict[str, Any] = {"width": 16384, "dimension": 512, "images": 1, "classes": 2}


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"steps": 3}, "two steps"),
        ({"images": 6}, "K² B⁴"),
        ({"width": 2048}, "neurons"),
        ({"independence": 0.5}, "neurons"),
        ({"images": 513}, "no unique decomposition"),
    ],
)
def test_a_condition_that_fails_is_named(changed: dict[str, Any], cause: str) -> None:
    size = {**SIZE, **changed}
    rate = tensor_rate(**{name: size[name] for name in SIZE})
    found = tensor_bound(rate, **size)
    assert not found.is_valid
    assert found.reason is not None and cause in found.reason
    assert (found.value is None) == (size["images"] > size["dimension"])


def test_a_bound_is_its_rate_over_the_moment() -> None:
    rate = tensor_rate(**SIZE)
    found = tensor_bound(rate, **SIZE)
    assert found.is_valid and found.reason is None
    assert found.value == pytest.approx(rate * math.sqrt(2 * math.pi))
    farther = tensor_bound(rate, **SIZE, independence=0.9)
    assert farther.value == pytest.approx(found.value / 0.81)
    loud = tensor_bound(tensor_rate(**SIZE, noise=5.0), **SIZE)
    assert not loud.is_valid and "unit vector" in (loud.reason or "")


def test_each_defense_has_a_bound_or_a_reason() -> None:
    keys: dict[str, Any] = {
        "width": 16384,
        "dimension": 512,
        "classes": 2,
        "noise_multiplier": 10,
        "steps": 4,
    }
    found = {each.defense: each for each in recovery(keys)}
    for each in found.values():
        assert each.valid == (each.reason is None)
        assert (each.lower is None) == (each.lower_reason is not None) == (each.identified is None)
        assert each.defense in describe(each)
    assert found["clipping"].upper == found["none"].upper
    assert found["pruning"].upper is None and found["pruning"].rate is None
    assert "two steps" in (found["local steps, one batch"].reason or "")
    private = found["clipping and noise (DP-SGD)"]
    assert private.identified == pytest.approx(gaussian_success_limit(0.001, math.sqrt(4) / 10))
    assert [each.defense for each in recovery({**keys, "noise_multiplier": 10}) if each.lower] == [
        "clipping and noise (DP-SGD)"
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [({"width": 16}, "dimension"), ({"width": 0, "dimension": 4}, "width"), ({"x": 1}, "x")],
)
def test_bad_keys_are_named(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(FedsimError, match=told):
        recovery(keys)


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
