"""Several releases of the same data, of which the whole privacy curves are known.

Each curve stands for a pair of distributions with just that curve, and the product of the pairs is
no better than any pair of neighbours (Zhu, Dong and Wang, Optimal Accounting of Differential
Privacy via Characteristic Function, AISTATS 2022). It is computed by dp_accounting: each curve is
joined at points by chords from above (Doroshenko et al., Connect the Dots, PETS 2022), whose pairs
are discrete and are convolved. What is stated is thus never below the truth, and above it by the
chords alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fedsim.contracts.guarantee import CurveMechanism
from fedsim.privacy.numerics.special import Array, checked_delta, least_epsilon

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

LogDelta = Callable[[Array], Array]
"""ε >= 0 -> log δ: the largest over neighbours, in both directions."""

_POINTS = 300
"""On each side of ε = 0."""
_TAIL = 1e-4
"""What the ends of a curve may add to δ, in units of δ."""
_FAR = 1e4


@lru_cache(maxsize=256)
def of_mechanisms(parts: tuple[CurveMechanism, ...], delta: float) -> float:
    """`epsilon` of one release by each of `parts`; a mechanism may be there several times."""
    return epsilon([part.log_delta for part in parts], delta)


def epsilon(curves: Sequence[LogDelta], delta: float) -> float:
    """The least proven ε >= 0 of all releases together at δ; inf if there is none.

    Of a single curve it is exact, of several an upper bound.

    Raises:
        FedsimError: δ is not in (0, 1).
    """
    target = float(checked_delta(delta))
    if not curves:
        return 0.0
    if len(curves) == 1:
        found = least_epsilon(
            lambda at: _at(curves[0], at), math.log(target), xtol=1e-12, rtol=1e-12, most=_FAR
        )
        # Rounded up by the tolerance: the claim must not be below the truth.
        return found * (1 + 1e-11) + 1e-11 if found > 0 else 0.0
    reaches = {curve: _reach(curve, target) for curve in set(curves)}
    if any(math.isinf(reach) for reach in reaches.values()):
        return math.inf
    step = max(reaches.values()) / _POINTS
    pairs = {curve: _chords(curve, reach, step) for curve, reach in reaches.items()}
    total = pairs[curves[0]]
    for curve in curves[1:]:
        total = total.compose(pairs[curve])
    found = float(total.get_epsilon_for_delta(target))
    # Up by the rounding of the convolution: the claim must not be below the truth.
    return found * (1 + 1e-9) + 1e-9 if found > 0 else 0.0


def _reach(curve: LogDelta, target: float) -> float:
    """Where δ(ε) has come down to what never goes away; inf if that is too much for δ."""
    points: Array = np.geomspace(1e-3, _FAR, 80, dtype=np.float64)
    deltas = np.exp(curve(points))
    floor = float(deltas[-1])
    if floor >= target:
        return math.inf
    return float(points[np.argmax(deltas <= floor + _TAIL * target)])


def _chords(curve: LogDelta, reach: float, step: float) -> PLDPmf:
    """A discrete pair whose curve is on or above `curve`, with losses of multiples of `step`."""
    from dp_accounting.pld import pld_pmf

    steps = max(1, math.ceil(reach / step))
    losses: Array = np.arange(steps + 1, dtype=np.float64) * step
    right = np.exp(curve(losses))
    # δ(-ε) = 1 - exp(-ε) (1 - δ(ε)), neighbours being so in both orders.
    left = 1 - np.exp(-losses[:0:-1]) * (1 - right[:0:-1])
    deltas = np.clip(np.concatenate([left, right]), 0.0, 1.0)
    points = np.arange(-steps, steps + 1)
    kept = _convex(np.exp(points * step), deltas)
    found = pld_pmf.create_pmf_pessimistic_connect_dots(
        step, points[kept], np.minimum.accumulate(deltas[kept])
    )
    return found.to_dense_pmf()


def _convex(x: Array, y: Array) -> list[int]:
    """Positions of the points on the lower convex hull: a privacy curve is convex in exp(ε)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) <= (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def _at(curve: LogDelta, epsilon: float) -> float:
    return float(curve(np.array([epsilon]))[0])
