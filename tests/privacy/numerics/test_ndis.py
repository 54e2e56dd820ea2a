"""Any two normal distributions: against high precision in 3 and 50 dimensions, laws, refusals."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from ndis_reference import rotated, two_groups

from fedsim.privacy.mechanisms import normal
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError


def random_pair(size: int, seed: int) -> tuple[np.ndarray, ...]:
    stream = np.random.default_rng(seed)
    means = stream.normal(size=(2, size)) / 2
    roots = stream.normal(size=(2, size, size)) / math.sqrt(size) + 2 * np.eye(size)
    return means[0], roots[0] @ roots[0].T, means[1], roots[1] @ roots[1].T


def log_moment_of(mean1, cov1, mean2, cov2):  # type: ignore[no-untyped-def]
    """log of the integral of N1^(1 + s) N2^(-s), from the matrices as they are."""
    first, second = (mp.matrix(cov.tolist()) for cov in (cov1, cov2))
    gap = mp.matrix([mp.mpf(x) - mp.mpf(y) for x, y in zip(mean1, mean2, strict=True)])
    roots = mp.eig(mp.eye(len(gap)) - mp.inverse(second) * first, left=False, right=False)
    singular = min([-1 / mp.re(root) for root in roots if mp.re(root) < 0], default=mp.mpf(2))
    constant = (mp.log(mp.det(second)) - mp.log(mp.det(first))) / 2

    def log_moment(s):  # type: ignore[no-untyped-def]
        mixed = (1 + s) * second - s * first
        shift = (gap.T * mp.lu_solve(mixed, gap))[0]
        spread = sum(mp.log(1 + s * mp.re(root)) for root in roots) / 2
        return s * constant - spread + s * (1 + s) * shift / 2

    return log_moment, min(singular, 2) / 2


@pytest.mark.parametrize(("seed", "epsilon"), [(0, 0.0), (1, 1.0)])
def test_three_dimensions_agree_with_the_moments_of_the_matrices(seed: int, epsilon: float) -> None:
    pair = random_pair(3, seed)
    with mp.workdps(16):
        log_moment, at = log_moment_of(*pair)
        expected = rotated(log_moment, epsilon, at)
        found = float(np.exp(normal.pair(*pair).log_delta(epsilon)))
        assert abs(found / expected - 1) < 1e-9


def test_fifty_dimensions_agree_with_two_groups_in_disguise() -> None:
    """N(0, I) against a normal whose precision is 1 - a1 once and 1 - a2 else, both mixed up."""
    a1, a2, b1, epsilon = -0.2, -0.01, 0.7, 0.4
    stream = np.random.default_rng(5)
    rotation, _ = np.linalg.qr(stream.normal(size=(50, 50)))
    mix = stream.normal(size=(50, 50)) / 7 + np.eye(50)
    precision = 1 - np.array([a1, *[a2] * 49])
    mean2 = np.zeros(50)
    mean2[0] = b1 / (1 - a1)  # b = precision of the second times the difference of the means
    place = mix @ rotation
    cov2 = place @ np.diag(1 / precision) @ place.T
    found = normal.pair(np.zeros(50), mix @ mix.T, place @ mean2, cov2).log_delta(epsilon)
    with mp.workdps(20):
        c = epsilon + float(np.log(precision).sum()) / 2 - b1**2 / (1 - a1) / 2
        expected = two_groups(mp.mpf(a1), mp.mpf(a2), mp.mpf(b1), c, 49)
        assert abs(float(np.exp(found)) / expected - 1) < 1e-9


def test_equal_covariances_are_the_gaussian_mechanism() -> None:
    mean1, cov, mean2, _ = random_pair(6, 2)
    distance = math.sqrt((mean1 - mean2) @ np.linalg.solve(cov, mean1 - mean2))
    for epsilon in (0.0, 0.3, 2.0, 20.0):
        found = normal.pair(mean1, cov, mean2, cov).log_delta(epsilon)
        assert found == pytest.approx(float(gaussian.log_delta(1 / distance, epsilon)), rel=1e-11)


def test_laws() -> None:
    pair = random_pair(5, 4)
    form = normal.pair(*pair)
    epsilons = np.linspace(0, 8, 30)
    curve = form.log_delta(epsilons)
    assert (np.diff(curve) < 0).all()
    # invertible maps do not change how far apart two distributions are
    stream = np.random.default_rng(0)
    mix, move = stream.normal(size=(5, 5)), stream.normal(size=5)
    mean1, cov1, mean2, cov2 = pair
    covs = mix @ cov1 @ mix.T, mix @ cov2 @ mix.T
    moved = normal.pair(mix @ mean1 + move, covs[0], mix @ mean2 + move, covs[1])
    assert np.allclose(moved.log_delta(epsilons), curve, rtol=1e-9)
    # dropping a dimension is post-processing
    fewer = normal.pair(mean1[:4], cov1[:4, :4], mean2[:4], cov2[:4, :4])
    assert (fewer.log_delta(epsilons) <= curve + 1e-12).all()
    # at ε = 0 it is the total variation, the same in both directions
    back = normal.pair(mean2, cov2, mean1, cov1)
    assert float(back.log_delta(0.0)) == pytest.approx(float(form.log_delta(0.0)), rel=1e-10)
    assert normal.pair(mean1, cov1, mean1, cov1).log_delta(0.0) == -math.inf


def test_directions_without_variance() -> None:
    flat = np.diag([1.0, 0.0])
    same = normal.pair([0, 1], flat, [0.5, 1], flat)
    assert float(same.log_delta(0.1)) == pytest.approx(float(gaussian.log_delta(2.0, 0.1)))
    for other in (([0, 1], flat, [0, 2], flat), ([0, 1], flat, [0, 1], np.eye(2))):
        assert normal.pair(*other).log_delta(3.0) == 0.0
        assert normal.pair(*other).epsilon(0.5) == math.inf
    # singular along a direction that is no axis
    line = np.ones((2, 2))
    assert float(normal.pair([0, 0], line, [1, 1], line).log_delta(0.0)) == pytest.approx(
        float(gaussian.log_delta(1.0, 0.0))
    )
    assert normal.pair([0, 0], line, [1, 0], line).log_delta(0.0) == 0.0


def test_the_estimator_keeps_its_guarantee() -> None:
    """Hoeffding's interval holds the exact value in at least the promised share of trials."""
    form = normal.pair(*random_pair(3, 8))
    exact = math.exp(float(form.log_delta(0.5)))
    held = 0
    for trial in range(100):
        rng = np.random.default_rng(trial)
        found, draws = normal._estimate(form, 0.5, error=0.05, confidence=0.9, rng=rng)
        assert draws == math.ceil(math.log(2 / 0.1) / (2 * 0.05**2))
        held += abs(found - exact) <= 0.05
    assert held >= 90
    many, _ = normal._estimate(form, 0.5, error=0.002, confidence=0.99, rng=rng)
    assert many == pytest.approx(exact, abs=0.002)


GOOD = ([0.0, 0.0], np.eye(2), [0.0, 0.0], np.eye(2))


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, [0.0], "has 2 dimensions, mean1 has 1"),
        (0, [0.0, math.nan], "not finite"),
        (1, [[1, 0.5], [0, 1]], "cov1: not symmetric"),
        (1, [[1, 2], [2, 1]], "cov1: not a covariance"),
        (3, [[1, 0, 0], [0, 1, 0]], "cov2: expected a square matrix"),
        (3, "x", "cov2: expected a square list"),
        (3, [[1, 1 - 1e-12], [1 - 1e-12, 1]], "ill-conditioned"),
    ],
)
def test_what_is_no_pair_is_refused(at: int, value: object, said: str) -> None:
    wrong = [*GOOD]
    wrong[at] = value  # type: ignore[call-overload]
    with pytest.raises(FedsimError, match=said):
        normal.pair(*wrong)
