"""Gaussian noise correlated between steps (DP-CGD): how far one example reaches, and what follows.

Step t of T releases g_t + z_t - λ z_(t-1), where g_t sums clipped gradients (norm at most 1) and
z_t ~ N(0, σ² I), z_0 = 0. That is G + C^-1 Z with C_ij = λ^(i-j) for i >= j, and as private as
C G + Z: the Gaussian mechanism on C G, also where g_t is chosen after seeing earlier releases
(Denisov et al., Improved Differential Privacy for SGD via Optimal Private Linear Operators on
Adaptive Streams, NeurIPS 2022, Theorem 2.1).

Source: Kalinin et al., DP-CGD: Efficient Noise Correlation for Differentially
Private Model Training, 2026; Population Risk Bounds for Kolmogorov-Arnold Networks Trained by
DP-SGD with Correlated Noise, 2026, Algorithm 1 and (24), (25).

Logarithms are natural; that of δ = 0 is -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from fedsim.privacy.composition.participation import Array, accumulate, grid_size, squared_norms
from fedsim.privacy.numerics import gaussian


def sensitivity(steps: int, correlation: float, participations: int | None = None) -> float:
    """Computes the L2 sensitivity of all steps together to one example of clipping norm 1.

    That is the largest ||C z|| over z (T,), 1 in steps that hold the example and else 0, of so many
    `participations` (None: all steps). An example that is left out moves the steps by so much; one
    that is replaced, by twice that.

    >>> sensitivity(4, 0.0), sensitivity(4, 0.0, 1), round(sensitivity(2, 0.5), 6)
    (2.0, 1.0, 1.802776)
    """
    present = steps if participations is None else min(participations, steps)
    if present == 0:
        return 0.0
    # The first steps reach farthest: C'C has the entries λ^|i-j| (1 - λ^(2 (T - m + 1))) / (1 - λ²)
    # with m = max(i, j), which fall with |i-j| and with m.
    # (C z)_t is 1 + λ + ... while the example takes part, and falls by the factor λ a step after.
    rising = np.cumsum(correlation ** np.arange(present))
    behind = steps - present
    decay = correlation ** (2 * np.arange(1, behind + 1))
    return math.sqrt(float((rising**2).sum() + rising[-1] ** 2 * decay.sum()))


def reach(schedules: Iterable[Sequence[bool]], correlation: float) -> float:
    """Computes the largest ||C z|| over z of equal length, where who takes part is public.

    >>> reach([(True, False), (False, True)], 0.5) == 1.25**0.5
    True
    """
    present = np.array(list(schedules), dtype=bool)
    return float(np.linalg.norm(accumulate(present, correlation), axis=1).max())


def log_delta(noise_multiplier: float, epsilon: float, reach: float) -> float:
    """Computes the exact log δ(ε) where an example moves C G by `reach` > 0 norms at most."""
    return float(gaussian.log_delta(noise_multiplier / reach, epsilon))


def log_delta_revealed(
    noise_multiplier: float,
    epsilon: float,
    *,
    steps: int,
    sampling_rate: float,
    correlation: float,
    factor: float,
) -> float:
    """Computes log of a bound on δ(ε) against an attacker who knows an example's batches.

    Given the batches z, both neighbours' releases are Gaussian, with means `factor` C z apart: 1 if
    the contribution is exchanged for zero, 2 if for any other. δ is jointly convex: δ(ε) <= E_z[δ
    of the Gaussian mechanism with sensitivity factor ||C z||]. That holds of batches of a fixed
    size too, whose other members may depend on whether the example was drawn. The mean over z is
    the only amplification.
    """
    return _log_mean_delta(
        noise_multiplier, epsilon, factor, *_group_norms(steps, sampling_rate, correlation)
    )


def log_delta_known_bin(
    noise_multiplier: float, epsilon: float, *, steps: int, bins: int, correlation: float
) -> float:
    """Computes log of a bound on δ(ε) for an example in every `bins`-th step.

    The first of these is uniformly one of the first `bins` steps, and the attacker knows which. The
    bound is that of `log_delta_revealed` with a factor of 1. Where `steps` times `bins` is very
    large, it is looser.
    """
    # Too large for a matrix of all bins: the worst places of as many participations bound each.
    if steps * bins > _MOST_CELLS:
        reached = [sensitivity(steps, correlation, math.ceil(steps / bins))]
        return _log_mean_delta(noise_multiplier, epsilon, 1.0, reached, [1.0], 0.0)
    present = np.arange(steps) % bins == np.arange(bins)[:, None]
    norms = np.linalg.norm(accumulate(present, correlation), axis=1)
    # With more bins than steps, some bins have no step; they release nothing, and add no δ.
    reached = norms[norms > 0].tolist()
    return _log_mean_delta(noise_multiplier, epsilon, 1.0, reached, [1 / bins] * len(reached), 0.0)


def _log_mean_delta(
    noise_multiplier: float,
    epsilon: float,
    factor: float,
    reached: list[float],
    weights: list[float],
    rest: float,
) -> float:
    """Computes log(Σ weight δ(reach) + rest)."""
    # Where the noise is below the least double, the ratio is 0: nothing is hidden.
    with np.errstate(over="ignore", under="ignore"):
        ratios = noise_multiplier / (factor * np.asarray(reached, dtype=np.float64))
    deltas = np.exp(gaussian.log_delta(ratios, epsilon))
    total = rest + float(np.dot(deltas, weights))
    return min(0.0, math.log(total)) if total > 0 else -math.inf


def log_delta_fixed_size(
    noise_multiplier: float,
    epsilon: float,
    *,
    steps: int,
    sampling_rate: float,
    correlation: float,
    factor: float,
) -> float:
    """Computes log of a bound on δ(ε) for batches of one size, drawn without replacement.

    The arguments are those of `log_delta_revealed`, and for `factor` 1 so is the result. A
    contribution that is exchanged for any other (`factor` 2) is amplified: with the probability 1 -
    γ = (1 - q)^T the example is never drawn.

    Both neighbours then release the same. That law is as far from the release with the example in
    steps z as the exchange is: its batches become those by exchanging the example for a random
    other one. By advanced joint convexity (Balle, Barthe and Gaboardi, Privacy Amplification by
    Subsampling, NeurIPS 2018, Theorem 2) δ(ε) <= γ E_z[δ of the Gaussian mechanism at ε' | z ≠ 0],
    exp(ε') = 1 + (exp(ε) - 1) / γ. For T = 1 that is attained. Exchanged for zero, the example is
    nearer to nothing than to another one, and no more is known than `log_delta_revealed`.
    """
    if factor == 2 and sampling_rate < 1:
        # γ = 1 - (1 - q)^T, without the cancellation where T q is small.
        drawn = -math.expm1(steps * math.log1p(-sampling_rate))
        # At ε = 0 the terms cancel, but for rounding.
        # This is ε' - ε, in a form in which exp(ε) cannot overflow.
        gain = math.log1p(-(1 - drawn) * math.exp(-epsilon)) - math.log(drawn)
        epsilon += max(0.0, gain)
    return log_delta_revealed(
        noise_multiplier,
        epsilon,
        steps=steps,
        sampling_rate=sampling_rate,
        correlation=correlation,
        factor=factor,
    )


@lru_cache(maxsize=64)
def _group_norms(
    steps: int, sampling_rate: float, correlation: float
) -> tuple[list[float], list[float], float]:
    """Computes (||C z||, probabilities, rest), in a few hundred groups at their largest norm."""
    if steps * grid_size(correlation) <= _MOST_CELLS:
        squares, weights, rest = squared_norms(steps, sampling_rate, correlation)
        norms = np.sqrt(squares)
    else:
        norms, weights, rest = _norms_by_count(steps, sampling_rate, correlation)
    # δ rises with the norm: each moves up to the next edge, so that δ can only be overestimated.
    edges = np.linspace(0.0, norms.max(), _GROUPS)
    group = np.minimum(np.searchsorted(edges, norms, side="left"), _GROUPS - 1)
    mass = np.bincount(group, weights, minlength=_GROUPS)
    held = (mass > 0) & (edges > 0)
    return edges[held].tolist(), mass[held].tolist(), rest


def _norms_by_count(steps: int, rate: float, correlation: float) -> tuple[Array, Array, float]:
    """Computes (norms, probabilities, rest) by how often the example takes part, at its worst."""
    from scipy.stats import binom

    ends = [float(binom.ppf(share, steps, rate)) for share in (_TAIL, 1 - _TAIL)]
    least, most = max(0.0, ends[0] - 1), min(float(steps), ends[1] + 1)
    counts = np.unique(np.append(np.ceil(np.linspace(least, most, 4 * _GROUPS)), 0.0))
    # The mass between two listed counts goes to the larger one, whose norm is larger.
    below = binom.cdf(counts, steps, rate)
    mass = np.diff(below, prepend=0.0)
    if steps <= _WORST_STEPS:
        norms = np.array([sensitivity(steps, correlation, int(count)) for count in counts])
    else:
        # Whatever the places of k participations, the norm is no more.
        norms = np.sqrt(counts) / (1 - correlation)
    # Differences of a rounded distribution function may be below 0.
    return norms, np.maximum(mass, 0.0), float(binom.sf(most, steps, rate))


_GROUPS = 400
"""Number of groups that norms are gathered in, each at its largest."""
_MOST_CELLS = 1_000_000
"""Steps times levels of the grid: about ten seconds."""
_WORST_STEPS = 20_000
"""Most steps for which the worst places of participations are summed; beyond, they are bounded."""
_TAIL = 1e-15
"""Probability of counts left out at either end: `rest` has the upper, the least count the lower."""
