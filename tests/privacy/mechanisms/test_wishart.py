"""Gaussian sampling: against the normal pair itself, the worst eigenvalues, the paper's lemma."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedsim.privacy.mechanisms import normal, wishart
from fedsim.privacy.numerics import quadratic


def of_eigenvalues(a: np.ndarray, k: float, epsilon: float) -> np.ndarray:
    """The larger direction of log δ for K^(1/2) K'^-1 K^(1/2) with eigenvalues 1 - a."""
    back = -a / (1 - a)
    count = np.full(a.shape, float(k))
    forward = quadratic.log_delta(a, 1 - a, np.zeros_like(a), count, epsilon)
    return np.maximum(
        forward, quadratic.log_delta(back, 1 - back, np.zeros_like(a), count, epsilon)
    )


def test_it_is_that_of_the_draws() -> None:
    """k independent draws are one normal vector of k blocks."""
    stream = np.random.default_rng(0)
    root = stream.normal(size=(3, 3)) + 2 * np.eye(3)
    kernel, a = root @ root.T, np.array([0.3, -0.2, 0.05])
    other = np.linalg.inv(np.linalg.inv(root).T @ np.diag(1 - a) @ np.linalg.inv(root))
    blocks = [np.kron(np.eye(4), each) for each in (kernel, other)]
    pairs = (
        normal.pair(np.zeros(12), blocks[0], np.zeros(12), blocks[1]),
        normal.pair(np.zeros(12), blocks[1], np.zeros(12), blocks[0]),
    )
    for epsilon in (0.0, 0.5, 3.0):
        expected = max(float(pair.log_delta(epsilon)) for pair in pairs)
        assert float(of_eigenvalues(a, 4, epsilon)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("distance", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_no_other_eigenvalues_at_that_distance_are_worse(distance: float, k: int) -> None:
    stream = np.random.default_rng(k)
    mean = distance * math.sqrt(k / 2)
    for epsilon in (0.0, 0.01 * mean, 0.3 * mean, mean, 4 * mean):
        bound = float(wishart.log_delta(k, distance, epsilon))
        for size in (2, 3, 6):
            directions = stream.normal(size=(60, size)) ** stream.choice([1, 3], size=(60, 1))
            a = distance * directions / np.linalg.norm(directions, axis=1, keepdims=True)
            assert of_eigenvalues(a, k, epsilon).max() <= bound + 1e-9


@pytest.mark.parametrize(("up", "down"), [(0.2, 0.1), (0.0, 0.4), (1.5, 0.6)])
def test_two_eigenvalues_are_those_of_the_draws_and_smaller_ones_tell_less(
    up: float, down: float
) -> None:
    stream = np.random.default_rng(1)
    bounds = np.array([[up, down]])
    for epsilon in (0.0, 0.5, 2.0):
        found = float(wishart.log_delta_of(7, bounds, epsilon))
        a = np.array([-up, down])
        expected = quadratic.log_delta(a, 1 - a, np.zeros(2), np.full(2, 7.0), epsilon)
        assert found == pytest.approx(float(expected), rel=1e-12)
        for share in stream.random((20, 2)):
            assert float(wishart.log_delta_of(7, bounds * share, epsilon)) <= found + 1e-9
        both = np.concatenate([bounds / 2, bounds, bounds / 3])
        assert float(wishart.log_delta_of(7, both, epsilon)) == found
    curve = wishart.log_delta_of(7, bounds, np.array([0.0, 0.5, 2.0]))
    assert curve.shape == (3,)
    assert float(curve[2]) == found


@pytest.mark.parametrize("separation", [0.05, np.array([[0.02, 0.0196]])])
def test_the_inverses_return_to_where_they_came_from(separation: float | np.ndarray) -> None:
    def log_delta(k: float, epsilon: float) -> float:
        return float(wishart.log_delta_at(k, separation, epsilon))

    draws = wishart.max_draws(separation, 1.0, 1e-3)
    assert log_delta(draws, 1.0) <= math.log(1e-3) < log_delta(draws + 1, 1.0)
    epsilon = wishart.epsilon(1000, separation, 1e-3)
    assert log_delta(1000, epsilon) == pytest.approx(math.log(1e-3), rel=1e-10)


def test_two_known_eigenvalues_allow_more_draws_than_their_distance() -> None:
    draws = wishart.max_draws(np.array([[0.02, 0.0196]]), 1.0, 1e-3)
    assert draws > wishart.max_draws(math.hypot(0.02, 0.0196), 1.0, 1e-3)


def test_singular_covariances_are_told_apart_and_equal_ones_never() -> None:
    for separation in (1.0, np.array([[0.5, 1.0]])):
        assert wishart.log_delta_at(3, separation, 5.0) == 0.0
        assert wishart.epsilon(3, separation, 0.1) == math.inf
    assert wishart.epsilon(3, np.array([[1e-6, 1e-6]]), 0.1) == 0.0


@pytest.mark.parametrize("k", [1, 10, 1000])
@pytest.mark.parametrize("delta", [2e-3, 1e-6])
def test_the_papers_lemma_holds_and_is_very_loose(k: int, delta: float) -> None:
    log = -math.log(delta)
    for epsilon in (0.1, 0.9):
        allowed = epsilon * min(1 / math.sqrt(8 * k * log), 1 / (8 * log))
        assert float(wishart.log_delta(k, 1.5 * allowed, epsilon)) < math.log(delta)
        assert wishart.paper_epsilon(k, allowed, delta) == pytest.approx(epsilon)
    assert wishart.paper_epsilon(k, 1.01 * allowed / 0.9, delta) == math.inf
