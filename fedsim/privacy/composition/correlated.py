"""Gaussian noise correlated between steps (DP-CGD): how far one example reaches, and what follows.

Step t of T releases g_t + z_t - λ z_(t-1), where g_t sums clipped gradients (norm at most 1) and
z_t ~ N(0, σ² I), z_0 = 0. That is G + C^-1 Z with C_ij = λ^(i-j) for i >= j, and as private as
C G + Z: the Gaussian mechanism on C G, also where g_t is chosen after seeing earlier releases
(Denisov et al., Improved Differential Privacy for SGD via Optimal Private Linear Operators on
Adaptive Streams, NeurIPS 2022, Theorem 2.1).

Source: Kalinin et al., DP-CGD: Efficient Noise Correlation for Differentially Private Model
Training, 2026; Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with
Correlated Noise, 2026, Algorithm 1 and (24), (25).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.privacy.numerics import gaussian, work
from fedsim.types import FedsimError

Array = NDArray[np.float64]
Rounding = Literal["up", "down"]

_ROUNDING = 1e-12
_LEAST, _TOLERANCE, _CELLS, _TAIL = 0.02, 0.01, 2048, 1e-12
"""Least level, relative distance of levels, cells of sums and mass left out of `_squared_norms`."""


def accumulate(present: Array | NDArray[np.bool_], correlation: float) -> Array:
    """Computes y_t = λ y_(t-1) + z_t of each row z (T,) of `present`, λ being `correlation`.

    `present` is (k, T), 1 where an example takes part in a step, else 0, or any other numbers. The
    result is (k, T) float64.
    """
    # C z by its recursion, in T steps in place of a T x T product.
    y = present.astype(np.float64)
    for t in range(1, y.shape[1]):
        y[:, t] += correlation * y[:, t - 1]
    return y


@dataclass(frozen=True)
class Grid:
    """Holds levels of y_t = λ y_(t-1) + z_t, rising from 0, and the next level after a step.

    z_t says whether the example is in the batch of step t, independently with probability q. On the
    grid y is always rounded up or always down, so that what is computed bounds the truth from that
    side. The grid is geometric: decay moves along it exactly, and only a participation is rounded.
    """

    levels: Array
    """(M,) values of y."""
    absent: NDArray[np.int64]
    """(M,) indices of the next levels of an example that is not in the batch."""
    present: NDArray[np.int64]
    """(M,) indices of the next levels of an example that is in the batch."""

    def moves(self, absent: float | Array, present: float | Array) -> Any:
        """Builds the (M, M) SciPy CSR array A that takes weights w (M,) of levels a step on: A @ w.

        `absent` and `present` weigh the moves to the levels in these fields: numbers, or (M,) by
        the level before.
        """
        from scipy.sparse import coo_array

        count = len(self.levels)
        rows = np.concatenate([self.absent, self.present])
        weights = np.concatenate([np.broadcast_to(w, count) for w in (absent, present)])
        columns = np.tile(np.arange(count), 2)
        return coo_array((weights, (rows, columns)), shape=(count, count)).tocsr()


def grid(correlation: float, least: float, tolerance: float, rounding: Rounding) -> Grid:
    """Builds a `Grid`, exact for λ = 0 and for an example's first participation.

    Args:
        correlation: λ in [0, 1).
        least: about the least level but 0, in (0, 1]; what decays below it stays there (rounded up)
            or becomes 0 (down).
        tolerance: above 0; neighbouring levels but 0 are at most a factor 1 + `tolerance` apart.
        rounding: side to which a participation that falls between two levels goes.
    """
    # Without memory y is the participation itself.
    if correlation == 0:
        one = np.array([0, 0]), np.array([1, 1])
        return Grid(np.array([0.0, 1.0]), *one)
    rate = -math.log(correlation)
    # Levels are a factor λ^(-1/fine) apart, so that a step's decay is exactly `fine` levels down.
    fine = math.ceil(rate / math.log1p(tolerance))
    # y never exceeds 1 / (1 - λ). From there λ y + 1 is at most y, and no move leaves the grid.
    above = math.ceil(-math.log1p(-correlation) / rate * fine)
    below = math.ceil(-math.log(least) / rate * fine)
    powers = np.arange(-below, above + 1)
    levels = np.concatenate([[0.0], np.exp(powers * (rate / fine))])
    exact = correlation * levels + 1
    # 1 is a level, whatever exp makes of it
    if rounding == "up":
        present = np.searchsorted(levels, exact * (1 - _ROUNDING), side="left")
    else:
        present = np.searchsorted(levels, exact * (1 + _ROUNDING), side="right") - 1
    absent = np.arange(len(levels)) - fine
    absent[absent < 1] = 1 if rounding == "up" else 0
    absent[0] = 0
    return Grid(levels, absent, present)


def grid_size(correlation: float, least: float = _LEAST, tolerance: float = _TOLERANCE) -> float:
    """Estimates how many levels `grid` builds of the same arguments; exactly 2 for `correlation` 0.

    By default the grid is that of `log_delta_revealed`: `least` is 0.02 and `tolerance` 0.01.
    """
    if correlation == 0:
        return 2.0
    rate = -math.log(correlation)
    fine = math.ceil(rate / math.log1p(tolerance))
    return 2 - (math.log1p(-correlation) + math.log(least)) / rate * fine


@lru_cache(maxsize=64)
def _squared_norms(
    steps: int, sampling_rate: float, correlation: float
) -> tuple[Array, Array, float]:
    """Computes (values, probabilities, rest beyond): the law of ||C z||², rounded up."""
    # Values are in no order, and may repeat. The arrays are cached: nobody may change them.
    if correlation == 0:
        from scipy.stats import binom

        count = np.arange(steps + 1)
        return count.astype(float), binom.pmf(count, steps, sampling_rate), 0.0
    along = grid(correlation, _LEAST, _TOLERANCE, "up")
    # The sum of y_t² grows only where the example participates: with y before the step, by this,
    # which counts the whole decay to come. That behind the last step is taken off at the end.
    gain = (1 + 2 * correlation * along.levels) / (1 - correlation**2)
    cell = _largest(along, gain, steps, sampling_rate) / _CELLS
    # Gains are rounded up to whole cells: the norm is never underestimated.
    shift = np.ceil(gain / cell).astype(int)
    stay = along.moves(1 - sampling_rate, 0.0)
    mass = np.zeros((len(along.levels), _CELLS + 1))
    mass[0, 0] = 1.0
    rest = 0.0
    for step in range(steps):
        work.tell(step, steps)
        after = stay @ mass
        # A participation at a level adds the same gain whatever
        # the sum was: a row moves as a whole.
        for level in np.flatnonzero(mass.any(axis=1)):
            kept = max(0, _CELLS + 1 - shift[level])
            row = sampling_rate * mass[level]
            after[along.present[level], _CELLS + 1 - kept :] += row[:kept]
            rest += float(row[kept:].sum())
        mass = after
    behind = _decay_to_come(along.levels, correlation)
    values = np.maximum(np.arange(_CELLS + 1) * cell - behind[:, None], 0.0)
    held = mass > 0
    return values[held], mass[held], rest


def _largest(along: Grid, gain: Array, steps: int, rate: float) -> float:
    """Bounds the sum of gains but for a probability of 1e-12, by Chernoff's bound."""
    best = math.inf
    # E[exp(tilt S)] by a forward pass with tilted weights, rescaled each step against overflow.
    for tilt in np.geomspace(1e-4, 30, 40) / gain[0]:
        step = along.moves(1 - rate, rate * np.exp(np.minimum(tilt * gain, 600.0)))
        log_moment, weight = 0.0, np.zeros(len(along.levels))
        weight[0] = 1.0
        for _ in range(steps):
            weight = step @ weight
            total = float(weight.sum())
            log_moment += math.log(total)
            weight /= total
        # Where the exponent was capped the moment is too small to bound anything.
        if tilt * gain[-1] < 600:
            best = min(best, (log_moment - math.log(_TAIL)) / tilt)
    return min(best, steps * float(gain[-1]))


def _decay_to_come(levels: Array, correlation: float) -> Array:
    """Returns (M,) lower bounds of λ² y² / (1 - λ²) for the true y behind each level."""
    # A participation enlarges y by at most this factor, counting what stays at the least level.
    factor = (1 + _TOLERANCE) * (1 + _LEAST)
    if correlation * factor >= 1:
        return np.zeros_like(levels)
    # The relative error r of y obeys r' <= λ factor r + factor - 1. Dividing by 1 + its fixed point
    # takes off no more than is true.
    spread = 1 + (factor - 1) / (1 - correlation * factor)
    whole = (correlation * levels / spread) ** 2 / (1 - correlation**2)
    # At the least level y may have decayed by any factor since: nothing is taken off.
    return np.where(levels > levels[min(1, len(levels) - 1)], whole, 0.0)


def sensitivity(steps: int, correlation: float, participations: int | None = None) -> float:
    """Computes the L2 sensitivity of all steps together to one example of clipping norm 1.

    Step t of T, `steps`, has the noise z_t - λ z_(t-1), λ in [0, 1) being the `correlation`. The
    result is the largest ||C z||, C_ij = λ^(i-j) for i >= j, over z (T,) that is 1 in
    `participations` steps (None, or above T: in all), else 0. An example that is left out moves the
    steps by so much, one that is replaced by twice that.

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
    """Computes the largest ||C z||, as in `sensitivity`, over one or more public `schedules` z.

    A schedule says of each step whether the client takes part. Without one, it is a FedsimError.

    >>> reach([(True, False), (False, True)], 0.5) == 1.25**0.5
    True
    """
    present = np.array(list(schedules), dtype=bool)
    if not present.size:
        raise FedsimError("schedules: expected at least one, of at least one step, got none")
    return float(np.linalg.norm(accumulate(present, correlation), axis=1).max())


def log_delta_revealed(
    noise_multiplier: float, epsilon: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """Computes ln of a bound on δ(ε) against an attacker who knows an example's batches.

    The example's contribution is exchanged for zero. Batches are drawn independently, or all of one
    size: other members may depend on whether the example was drawn. The result is -inf for δ = 0. A
    FedsimError refuses an ε or noise below 0.

    Args:
        noise_multiplier: standard deviation of z_t over the clipping norm.
        epsilon: at least 0.
        steps: T, of which step t releases with the noise z_t - λ z_(t-1).
        sampling_rate: probability of the example to be in a step's batch.
        correlation: λ in [0, 1).
    """
    # Given the batches z, both neighbours' releases are Gaussian, with means C z apart. δ is
    # jointly convex, so that the mean over z bounds it; that is the only amplification.
    norms = _group_norms(steps, sampling_rate, correlation)
    return _log_mean_delta(noise_multiplier, epsilon, *norms)


def log_delta_known_bin(
    noise_multiplier: float, epsilon: float, *, steps: int, bins: int, correlation: float
) -> float:
    """Computes the bound of `log_delta_revealed` for an example in every `bins`-th step.

    The first of these is uniformly one of the first `bins` steps, and the attacker knows which.
    Where `steps` times `bins` is above 10^6, the bound is looser.

    Args:
        noise_multiplier: as of `log_delta_revealed`.
        epsilon: at least 0.
        steps: T.
        bins: distance of the example's steps; it may be more than `steps`.
        correlation: λ in [0, 1).
    """
    # Too large for a matrix of all bins: the worst places of as many participations bound each.
    if steps * bins > _MOST_CELLS:
        reached = [sensitivity(steps, correlation, math.ceil(steps / bins))]
        return _log_mean_delta(noise_multiplier, epsilon, reached, [1.0], 0.0)
    present = np.arange(steps) % bins == np.arange(bins)[:, None]
    norms = np.linalg.norm(accumulate(present, correlation), axis=1)
    # With more bins than steps, some bins have no step; they release nothing, and add no δ.
    reached = norms[norms > 0].tolist()
    return _log_mean_delta(noise_multiplier, epsilon, reached, [1 / bins] * len(reached), 0.0)


def _log_mean_delta(
    noise: float, epsilon: float, reached: list[float], weights: list[float], rest: float
) -> float:
    # Where the noise is below the least double, the ratio is 0: nothing is hidden.
    with np.errstate(over="ignore", under="ignore"):
        ratios = noise / np.asarray(reached, dtype=np.float64)
    deltas = np.exp(gaussian.log_delta(ratios, epsilon))
    total = rest + float(np.dot(deltas, weights))
    return min(0.0, math.log(total)) if total > 0 else -math.inf


def log_delta_replaced(
    noise_multiplier: float, epsilon: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """Computes ln of a bound on δ(ε) for an example exchanged for any other, in hidden batches.

    Batches are of one size, drawn without replacement. For one step the bound is attained.

    Args:
        noise_multiplier: as of `log_delta_revealed`.
        epsilon: at least 0.
        steps: T.
        sampling_rate: probability of the example to be in a step's batch.
        correlation: λ in [0, 1).
    """
    # With the probability 1 - γ = (1 - q)^T the example is never drawn, and both neighbours release
    # the same. That law is as far from the release with the example in steps z as the exchange is:
    # its batches become those by exchanging the example for a random other one. By advanced joint
    # convexity (Balle, Barthe and Gaboardi, Privacy Amplification by Subsampling, NeurIPS 2018,
    # Theorem 2) δ(ε) <= γ E_z[δ of the Gaussian mechanism at ε' | z ≠ 0], exp(ε') = 1 + (exp(ε) -
    # 1) / γ. Exchanged for zero, the example is nearer to nothing than to another one, and no more
    # is known than `log_delta_revealed`.
    if sampling_rate < 1:
        # γ = 1 - (1 - q)^T, without the cancellation where T q is small.
        drawn = -math.expm1(steps * math.log1p(-sampling_rate))
        # At ε = 0 the terms cancel, but for rounding.
        # This is ε' - ε, in a form in which exp(ε) cannot overflow.
        gain = math.log1p(-(1 - drawn) * math.exp(-epsilon)) - math.log(drawn)
        epsilon += max(0.0, gain)
    # Another contribution is twice as far away as zero is.
    norms = _group_norms(steps, sampling_rate, correlation)
    return _log_mean_delta(noise_multiplier / 2, epsilon, *norms)


@lru_cache(maxsize=64)
def _group_norms(
    steps: int, sampling_rate: float, correlation: float
) -> tuple[list[float], list[float], float]:
    """Computes (||C z||, probabilities, rest), in a few hundred groups at their largest norm."""
    if steps * grid_size(correlation) <= _MOST_CELLS:
        squares, weights, rest = _squared_norms(steps, sampling_rate, correlation)
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

    ends = [float(binom.ppf(share, steps, rate)) for share in (_LEFT_OUT, 1 - _LEFT_OUT)]
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
_LEFT_OUT = 1e-15
"""Probability of counts left out at either end: `rest` has the upper, the least count the lower."""
