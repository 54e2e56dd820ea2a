"""ε of several releases of the same data, from the privacy curve δ(ε) of each.

Two proofs are computed, and the smaller ε is stated:

- Basic composition: releases that are (ε_i, δ_i)-private are together (Σ ε_i, Σ δ_i)-private (Dwork
  and Roth, The Algorithmic Foundations of Differential Privacy, 2014, Theorem 3.16).
- Numerical composition: a privacy curve is that of a dominating pair of distributions, and the
  product of the pairs dominates the releases together (Zhu, Dong and Wang, Optimal Accounting of
  Differential Privacy via Characteristic Function, AISTATS 2022). Each curve is evaluated at points
  and joined between them by chords from above (Doroshenko et al., Connect the Dots, PETS 2022);
  dp_accounting convolves the discrete pairs that have these curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fedsim.contracts.guarantee import CurveMechanism
from fedsim.privacy.numerics.special import Array, least, require_delta

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

LogDelta = Callable[[Array], Array]
"""A privacy curve: ε >= 0 -> log δ, the larger of both directions, for the worst neighbours."""

_POINTS = 300
"""Points of a curve on each side of ε = 0."""
_TAIL = 1e-4
"""The most that cutting a curve off at its ends may add to δ, as a share of δ."""
_FAR = 1e4
"""The ε at which a curve is taken to have come down to its limit."""

_ROUNDING = 1e-14
"""The relative error of a sum of limits, which are known by their logarithms."""


@lru_cache(maxsize=256)
def of_mechanisms(parts: tuple[CurveMechanism, ...], delta: float) -> float:
    """Computes ε at δ of one release by each of `parts`, which may repeat: see `epsilon`."""
    return epsilon([part.log_delta for part in parts], delta)


def epsilon(curves: Sequence[LogDelta], delta: float) -> float:
    """Computes the least proven ε >= 0 of all releases together at δ; inf if none is found.

    `curves` has a function for each release, from an array of ε >= 0 to ln δ in its shape; no
    curve is followed beyond an ε of 10^4. The result is exact for one curve, an upper bound for
    several, and 0 for none. A δ that is not in (0, 1) is a FedsimError.
    """
    target = float(require_delta(delta))
    # what releases nothing costs nothing, not even the rounding of a composition
    curves = [curve for curve in curves if _at(curve, 0.0) > -math.inf]
    if not curves:
        return 0.0
    if len(curves) == 1:
        return _inverse(curves[0], math.log(target))
    return min(_basic(curves, target), _numerical(curves, target))


def _basic(curves: Sequence[LogDelta], delta: float) -> float:
    """Computes Σ ε_i for δ_i = lim δ_i(ε) + an equal share of what these limits leave of δ."""
    # A pure ε_i-private release has the limit 0, so that it never counts for more than ε_i.
    limits = {curve: _at(curve, _FAR) for curve in set(curves)}
    left = delta - sum(math.exp(limits[curve]) for curve in curves)
    if left < -_ROUNDING * delta:
        return math.inf
    # Rounding may leave a little less than nothing: each curve is then asked for at its limit.
    share = math.log(left / len(curves)) if left > 0 else -math.inf
    each = {
        curve: _inverse(curve, float(np.logaddexp(limit, share))) for curve, limit in limits.items()
    }
    return math.fsum(each[curve] for curve in curves)


def _inverse(curve: LogDelta, target: float) -> float:
    """Computes the least ε >= 0 at which log δ is at most `target`; inf if there is none."""
    return least(lambda at: _at(curve, at) <= target, most=_FAR)


def _numerical(curves: Sequence[LogDelta], delta: float) -> float:
    reaches = {curve: _reach(curve, delta) for curve in set(curves)}
    if any(math.isinf(reach) for reach in reaches.values()):
        return math.inf
    # Discrete pairs can only be convolved on one grid of losses: the widest curve sets its step.
    step = max(reaches.values()) / _POINTS
    pairs = {curve: _chords(curve, reach, step) for curve, reach in reaches.items()}
    total = pairs[curves[0]]
    for curve in curves[1:]:
        total = total.compose(pairs[curve])
    found = float(total.get_epsilon_for_delta(delta))
    # Up by the rounding of the convolution: the claim must not be below the truth.
    return found * (1 + 1e-9) + 1e-9 if found > 0 else 0.0


def _reach(curve: LogDelta, delta: float) -> float:
    """Finds an ε at which the curve has come down to its limit; inf if the limit is δ or more."""
    points: Array = np.geomspace(1e-3, _FAR, 80, dtype=np.float64)
    deltas = np.exp(curve(points))
    limit = float(deltas[-1])
    if limit >= delta:
        return math.inf
    # The last point is the limit itself, so that argmax finds a true entry.
    return float(points[np.argmax(deltas <= limit + _TAIL * delta)])


def _chords(curve: LogDelta, reach: float, step: float) -> PLDPmf:
    """Builds a pair with losses at multiples of `step`, whose curve is at or above `curve`."""
    from dp_accounting.pld import pld_pmf

    steps = max(1, math.ceil(reach / step))
    losses: Array = np.arange(steps + 1, dtype=np.float64) * step
    right = np.exp(curve(losses))
    # δ(-ε) = 1 - exp(-ε) (1 - δ(ε)), since the curve is the larger of both directions.
    left = 1 - np.exp(-losses[:0:-1]) * (1 - right[:0:-1])
    deltas = np.clip(np.concatenate([left, right]), 0.0, 1.0)
    points = np.arange(-steps, steps + 1)
    # A point that rounding lifted above its neighbours' chord would get a negative probability.
    kept = _convex(np.exp(points * step), deltas)
    found = pld_pmf.create_pmf_pessimistic_connect_dots(
        step, points[kept], np.minimum.accumulate(deltas[kept])
    )
    return found.to_dense_pmf()


def _convex(x: Array, y: Array) -> list[int]:
    """Finds the points on the lower convex hull, by index: a privacy curve is convex in exp(ε)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            # Andrew's monotone chain: b stays only if it is on or below the chord from a to i.
            if (y[b] - y[a]) * (x[i] - x[a]) <= (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def _at(curve: LogDelta, epsilon: float) -> float:
    return float(curve(np.array([epsilon]))[0])
