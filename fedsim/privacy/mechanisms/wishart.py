"""The exact privacy curve of the Gaussian sampling mechanism: a sum of squares of normal vectors.

The mechanism releases (1/k) Σ g_i g_i' of k draws g_i of N(0, K), K being a positive definite
function of the data (Algorithm 1 of DP-NTK regression, after Alabi et al., Privately Estimating a
Gaussian, STOC 2023, Theorem 5.1). The release is a function of the draws, and
their likelihood ratio of K against K' is a function of the release, so its δ is that of k draws of
N(0, K) against k of N(0, K'): a quadratic form (`quadratic`) in the eigenvalues λ_j of
K^(1/2) K'^-1 K^(1/2), each k times.

All that is known of neighbours is M = |K^(1/2) K'^-1 K^(1/2) - I|_F = sqrt(Σ (1 - λ_j)²). δ is
then the largest over all eigenvalues at that distance and over both directions. It is taken to be
that of m eigenvalues 1 ± M / sqrt(m) and otherwise ones, the worst m from 1 to ∞ (where it is a
Gaussian mechanism): m = 1 but for small ε. That is not proven; a search over random eigenvalues
finds none worse. From M = 1 on K' may be singular, and δ is 1.

Where one row of the data moves, only two eigenvalues differ from one, and how far they can is known
(`kernel_distance`): there δ is proven (`log_delta_of`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fedsim.privacy.numerics import gaussian, quadratic
from fedsim.privacy.numerics.special import (
    Array,
    least_epsilon,
    require_delta,
    require_epsilon,
    require_range,
)
from fedsim.types import FedsimError

# Numbers m of eigenvalues that are tried: all up to 32, and then 2^(1/2) times as many each.
_SPREADS = np.unique(np.round(np.concatenate([np.arange(1, 33), 2 ** np.arange(5.5, 20, 0.5)])))


def log_delta(k: ArrayLike, distance: ArrayLike, epsilon: ArrayLike) -> Array:
    """Computes ln δ of `k` draws of N(0, K), for neighbours' covariances K' at a distance of M.

    M is |K^(1/2) K'^-1 K^(1/2) - I|_F, and δ the largest that a search found at that distance. The
    arguments broadcast: k >= 1, M >= 0 (from 1 on, δ is 1) and ε >= 0; others are a FedsimError.

    >>> float(np.exp(log_delta(1000, 0.1, 5.0)).round(6))
    0.120146
    """
    most = np.finfo(float).max
    count, far, eps = np.broadcast_arrays(
        require_range("k", k, 1.0, most, "a number of draws, at least 1"),
        require_range("distance", distance, 0.0, most, "a distance of at least 0"),
        require_epsilon(epsilon),
    )
    shape = eps.shape
    count, far, eps = (x.ravel() for x in (count, far, eps))
    result = np.where(far >= 1, 0.0, -np.inf)
    live = (far > 0) & (far < 1)
    if live.any():
        at = far[live, None] / np.sqrt(_SPREADS)
        # 1 + a and 1 - a, and both directions of each: the reverse of a is -a / (1 - a).
        a = np.concatenate([at, -at, -at / (1 - at), at / (1 + at)], axis=-1)[..., None]
        rest = np.concatenate([1 - at, 1 + at, 1 / (1 - at), 1 / (1 + at)], axis=-1)[..., None]
        counts = np.tile(count[live, None] * _SPREADS, 4)[..., None]
        several = quadratic.log_delta(a, rest, np.zeros_like(a), counts, eps[live, None])
        # As m grows, L tends to a normal variable: the Gaussian mechanism with μ = M sqrt(k / 2).
        limit = gaussian.log_delta(1 / (far[live] * np.sqrt(count[live] / 2)), eps[live])
        result[live] = np.maximum(several.max(-1), limit)
    return result.reshape(shape)[()]


def log_delta_of(k: float, eigenvalues: Array, epsilon: ArrayLike) -> Array:
    """Computes ln δ, in the shape of `epsilon` >= 0, of `k` >= 1 draws of N(0, K).

    `eigenvalues` are (n, 2) rows of (λ+, λ-), at least 0. For any neighbours in either order,
    K^(1/2) K'^-1 K^(1/2) has the eigenvalues 1 + a and 1 - b besides ones, and one of the rows has
    a <= λ+ and b <= λ-. δ is 1 if some λ- is 1 or more. Arguments out of range are a FedsimError.
    """
    count, eps = require_range("k", k, 1.0, np.finfo(float).max, "draws"), require_epsilon(epsilon)
    up, down = require_range("eigenvalues", eigenvalues, 0.0, np.inf, "two of 0 or more").T
    # One of the two is singular where the other is not, so that a draw tells them apart.
    if (down >= 1).any():
        return np.zeros(eps.shape)[()]
    a, rest = np.stack([-up, down], axis=-1), np.stack([1 + up, 1 - down], axis=-1)
    counts = np.full_like(a, float(count))
    found = quadratic.log_delta(a, rest, np.zeros_like(a), counts, eps[..., None])
    return np.asarray(found.max(axis=-1))[()]


def log_delta_at(k: float, separation: float | Array, epsilon: ArrayLike) -> Array:
    """Returns `log_delta` if `separation` is a distance, or `log_delta_of` its (n, 2) rows."""
    if isinstance(separation, np.ndarray):
        return log_delta_of(k, separation, epsilon)
    return log_delta(k, separation, epsilon)


def epsilon(k: float, separation: float | Array, delta: float) -> float:
    """Computes the least ε >= 0 at which δ of `k` draws is at most `delta`.

    `separation` and errors are as of `log_delta_at`. The result is inf where neighbours'
    covariances may be told apart for sure, as at a distance of 1 or more.
    """
    at_zero = float(log_delta_at(k, separation, 0.0))
    target = float(np.log(require_delta(delta)))
    if at_zero == 0.0 if isinstance(separation, np.ndarray) else separation >= 1:
        return math.inf
    return least_epsilon(
        lambda at: float(log_delta_at(k, separation, at)), target, xtol=1e-300, rtol=1e-14
    )


def max_draws(separation: float | Array, epsilon: float, delta: float) -> int:
    """Finds the largest number of draws that is (ε, δ)-private; a FedsimError from 2^39 on.

    It is 0 if none is. `separation` and further errors are as of `log_delta_at`.
    """
    target = float(np.log(require_delta(delta)))
    low, high = 0, 1
    # δ rises with k: doubling brackets the largest private k, and bisection finds it.
    while log_delta_at(high, separation, epsilon) <= target:
        low, high = high, 2 * high
        if high > 10**12:
            raise FedsimError("distance: so small that more than 10^12 draws are private")
    while high - low > 1:
        middle = (low + high) // 2
        is_private = log_delta_at(middle, separation, epsilon) <= target
        low, high = (middle, high) if is_private else (low, middle)
    return low


def paper_epsilon(k: float, distance: float, delta: float) -> float:
    """Computes the ε that DP-NTK regression's Lemma 5.4 states for `k` draws at `distance` M.

    The lemma allows M up to min{ε / sqrt(8 k log(1/δ)), ε / (8 log(1/δ))}, for ε < 1 only: the
    result is inf if it is 1 or more. A δ that is not in (0, 1) is a FedsimError.
    """
    log = -float(np.log(require_delta(delta)))
    stated = distance / min(1 / math.sqrt(8 * k * log), 1 / (8 * log))
    return stated if stated < 1 else math.inf
