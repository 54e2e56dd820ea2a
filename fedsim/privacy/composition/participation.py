"""Tracks one example's participations under correlated noise: y = C z, C_ij = λ^(i-j).

z_t says whether the example is in the batch of step t, independently with probability q, and
y_t = λ y_(t-1) + z_t. There are 2^T such vectors; here y lives on a grid, always rounded up or
always down, so that what is computed bounds the truth from that side. The grid is geometric with
ratio λ^(1/m): decay moves along it exactly, and only a participation is rounded. No argument is
checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsim.privacy.numerics import work

Array = NDArray[np.float64]
Rounding = Literal["up", "down"]

_ROUNDING = 1e-12
"""Relative rounding of the levels."""
_LEAST, _TOLERANCE, _CELLS, _TAIL = 0.02, 0.01, 2048, 1e-12
"""Least level, relative distance of levels, cells of sums and mass left out of `squared_norms`."""


def accumulate(present: Array | NDArray[np.bool_], correlation: float) -> Array:
    """Computes (k, T) y = C z of every row z of `present`, (k, T) participations of 0 or 1."""
    # C z by its recursion, in T steps in place of a T x T product.
    y = present.astype(np.float64)
    for t in range(1, y.shape[1]):
        y[:, t] += correlation * y[:, t - 1]
    return y


@dataclass(frozen=True)
class Grid:
    """Levels of y in rising order, the first being 0, and the next level of each after a step."""

    levels: Array
    """(M,) values of y."""
    absent: NDArray[np.int64]
    """(M,) indices of the next levels of an example that is not in the batch."""
    present: NDArray[np.int64]
    """(M,) indices of the next levels of an example that is in the batch."""

    def moves(self, absent: float | Array, present: float | Array) -> Any:
        """Builds the sparse (M, M) matrix whose product with weights (M,) is those a step later.

        `absent` and `present` are the weights, numbers or (M,), of the two moves from each level.
        """
        from scipy.sparse import coo_array

        count = len(self.levels)
        rows = np.concatenate([self.absent, self.present])
        weights = np.concatenate([np.broadcast_to(w, count) for w in (absent, present)])
        columns = np.tile(np.arange(count), 2)
        return coo_array((weights, (rows, columns)), shape=(count, count)).tocsr()


def grid(correlation: float, least: float, tolerance: float, rounding: Rounding) -> Grid:
    """Builds the levels of y, exact for λ = 0 and for an example's first participation.

    A level that decays below `least` stays there (rounded up) or becomes 0 (down). Neighbouring
    levels are at most a factor 1 + `tolerance` apart.
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
    """Estimates how many levels `grid` builds; λ close to 1 has one per step of decay."""
    if correlation == 0:
        return 2.0
    rate = -math.log(correlation)
    fine = math.ceil(rate / math.log1p(tolerance))
    return 2 - (math.log1p(-correlation) + math.log(least)) / rate * fine


@lru_cache(maxsize=64)
def squared_norms(
    steps: int, sampling_rate: float, correlation: float
) -> tuple[Array, Array, float]:
    """Computes (values, probabilities, rest): the distribution of ||C z||² over z, rounded up.

    Values and probabilities are two (k,) arrays, which are kept for the next call and must not be
    changed. Values are in no order, and may repeat. `rest` is the probability (at most 1e-12) of
    all that lies above the largest. The result is exact for λ = 0.
    """
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
