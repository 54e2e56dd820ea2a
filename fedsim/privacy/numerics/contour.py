"""Integrals through a saddle point, of a product of powers and of exponentials of fractions.

The integrand is exp(E), E(z) = slope z + Σ_j [power_j (reach_j z - log(1 + reach_j z))
+ bulk_j z² / (1 + reach_j z)], with its saddle point close to z = 0 and z in units of the saddle's
width there: |slope| is small and E'' is 1. The path goes upwards from 0, z = y i + x(y), with
y = sinh(v), and bends to the side on which the integrand falls; the trapezoid rule in v then
converges geometrically (Trefethen and Weideman, The Exponentially Convergent Trapezoidal Rule, SIAM
Review 2014), so that half of the nodes tell how good all of them are. The integrand is real on the
real axis, which makes the lower half of the path the mirror image of the upper one.

All numbers are kept as real and imaginary parts: NumPy's real functions are many times as fast as
its complex ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.privacy.numerics.special import Array

Columns = NDArray[Any]
_TILT = 0.7
"""How steeply the path leaves the vertical in the end."""
_SHARPEST = 1.0
"""The least `bend`."""
_LONG = 6.0
"""The length beyond which another bend may be shorter."""
_DEPTH = 42.0
"""The path ends where the integrand has fallen by exp(-42)."""
_LENGTHS = np.geomspace(2.8, 45.0, 32)
"""The lengths of path to choose from, in v."""
_DENSITY = 9.0
"""Nodes per length at first: enough for nearly all integrands."""
_MOST = 1 << 16
_AGREEMENT = 1e-12
"""Of all nodes with half of them, relative. At 1e-9 one of 10^5 agrees by chance, wrong by 7e-9."""
_GROWTH = 1.0
"""The growth of E along a path beyond which another is looked for."""
_CHUNK = 1 << 15
"""Numbers that are held at a time, per array: few enough to stay in the cache."""


@dataclass(frozen=True)
class Integrand:
    """Integrands, one in each column: `slope` has shape (N,), the others (terms, N)."""

    slope: Array
    reach: Array
    power: Array
    bulk: Array

    @cached_property
    def _linear(self) -> Array:
        return np.asarray(self.slope + (self.power * self.reach).sum(0))

    @cached_property
    def _present(self) -> list[tuple[bool, bool]]:
        """Of each term, whether any column has it as a power, and as a fraction."""
        return [(bool(p.any()), bool(b.any())) for p, b in zip(self.power, self.bulk, strict=True)]

    def log(self, x: Array, y: Array, some: Columns) -> tuple[Array, Array]:
        """Real and imaginary part of E at x + i y, of shape (columns, nodes)."""
        linear = self._linear[some, None]
        size, phase = linear * x, linear * y
        for j, (powers, bulks) in enumerate(self._present):
            reach = self.reach[j, some, None]
            u, v = reach * x, reach * y
            excess = u * (2 + u) + v * v  # |1 + reach z|² - 1
            u += 1
            if powers:
                power = self.power[j, some, None]
                size -= (power / 2) * np.log1p(excess)
                phase -= power * np.arctan2(v, u)
            if bulks:
                share = self.bulk[j, some, None] / (1 + excess)
                real, imaginary = x * x - y * y, 2 * x * y
                size += share * (real * u + imaginary * v)
                phase += share * (imaginary * u - real * v)
        return size, phase


def integral(of: Integrand) -> tuple[Array, Array]:
    """(N,) ∫ exp(E(z)) dz / (2 i) from end to end of the path, and the mean of z under exp(E)."""
    path = _Path(of)
    every = np.arange(len(of.slope))
    total, grown = np.empty((2, len(every))), np.empty(len(every))
    path.sum(every, total, grown, _GROWTH)
    wrong = every[~(grown < _GROWTH)]
    if len(wrong):
        path.choose(wrong)
        path.sum(wrong, total, grown, np.inf)
    return total[0], total[1] / total[0]


class _Path:
    """x + i y, y = sinh(v) for v from 0 to a length, with x bending to a `side` from `bend` on."""

    def __init__(self, of: Integrand) -> None:
        self._of = of
        # Where z is small, that of steepest descent is x = skewness y².
        skewness = -(of.reach * (of.power * of.reach**2 / 3 + of.bulk)).sum(0)
        self._side = np.sign(skewness)
        with np.errstate(divide="ignore"):
            self._bend = np.maximum(_SHARPEST, _TILT / 2 / np.abs(skewness))
        self._level = self._ends(np.arange(len(of.slope)), self._side, self._bend)
        """Of the path's length among `_LENGTHS`."""
        self._shorten(np.flatnonzero(_LENGTHS[self._level] > _LONG))

    def _shorten(self, columns: Columns) -> None:
        """Bend by what is linear in z far out, where that makes the path shorter."""
        reach, power, bulk = (
            x[:, columns] for x in (self._of.reach, self._of.power, self._of.bulk)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = np.where(bulk > 0, bulk / reach, 0.0)
        pull = np.nan_to_num(np.concatenate([power * reach, tails]), posinf=1e300, neginf=-1e300)
        side = -np.sign(pull.sum(0))
        # So late that what falls to the other side is outweighed by the saddle's own width.
        bend = np.maximum(1.0, 2 * _TILT * np.maximum(pull * side, 0.0).sum(0))
        level = self._ends(columns, side, bend)
        better = level < self._level[columns]
        chosen = columns[better]
        self._side[chosen], self._bend[chosen] = side[better], bend[better]
        self._level[chosen] = level[better]

    def sum(self, columns: Columns, total: Array, grown: Array, most: float) -> None:
        """Write the integrals of exp(E) and of z exp(E), and how much E has grown.

        Those that have grown by `most` or more are not worth more nodes.
        """
        for level in np.unique(self._level[columns]):
            length = _LENGTHS[level]
            alike = columns[self._level[columns] == level]
            nodes = 2 * int(np.ceil(length * _DENSITY / 2))
            for some in _pieces(alike, nodes):
                self._converge(some, length, nodes, total, grown, most)

    def _converge(
        self, some: Columns, length: float, nodes: int, total: Array, grown: Array, most: float
    ) -> None:
        at = np.arange(1, nodes + 1) / nodes
        size, values, moments = self._values(length * at, some)
        grown[some] = size.max(-1)
        # at 0 exp(E) is 1, once for both halves of the path
        sums = np.stack([values.sum(-1) + 0.5, moments.sum(-1)])
        old, new = (values[:, 1::2].sum(-1) + 0.5) * 2, sums[0]
        total[:, some] = sums * (length / nodes)
        while nodes < _MOST:
            apart = (np.abs(new - old) > _AGREEMENT * np.abs(new)) & (grown[some] < most)
            if not apart.any():
                return
            some, sums = some[apart], sums[:, apart]
            old = 2 * sums[0]
            for part in _pieces(np.arange(len(some)), nodes):
                fresh = self._values(length * (np.arange(nodes) + 0.5) / nodes, some[part])[1:]
                sums[:, part] += [each.sum(-1) for each in fresh]
            nodes *= 2
            new = sums[0]
            total[:, some] = sums * (length / nodes)

    def _values(self, v: Array, some: Columns) -> tuple[Array, Array, Array]:
        """E's real part, and the real parts of exp(E) dz / (i dv) and of z times that."""
        with np.errstate(over="ignore", invalid="ignore"):
            x, y, turn = _bent(v, self._side[some, None], self._bend[some, None])
            size, phase = self._of.log(x, y, some)
            weight = np.exp(size) * np.cosh(v)
            cosine, sine = np.cos(phase), np.sin(phase)
            values = weight * (cosine + turn * sine)
            moments = values * x - weight * (sine - turn * cosine) * y
        return size, values, moments

    def _fall(self, v: Array, some: Columns, side: Array, bend: Array) -> Array:
        """log of the integrand's size by v, relative to the saddle point."""
        with np.errstate(over="ignore", invalid="ignore"):
            x, y, _ = _bent(v, side[:, None], bend[:, None])
            size = self._of.log(x, y, some)[0] + np.log(np.cosh(v))
        return np.where(np.isnan(size), np.inf, size)

    def _ends(self, columns: Columns, side: Array, bend: Array) -> Columns:
        """The least level at which the integrand has fallen, if it is falling all the way."""
        ends = np.empty(len(columns), dtype=np.intp)
        for part in _pieces(np.arange(len(columns)), 1):
            short, long = np.full(len(part), -1), np.full(len(part), len(_LENGTHS) - 1)
            for _ in range(len(_LENGTHS).bit_length() - 1):
                middle = (short + long) // 2
                v = _LENGTHS[middle, None]
                fallen = self._fall(v, columns[part], side[part], bend[part])[:, 0] < -_DEPTH
                short, long = np.where(fallen, short, middle), np.where(fallen, middle, long)
            ends[part] = long
        return ends

    def choose(self, columns: Columns) -> None:
        """Try where else the path may bend; take the shortest on which nothing grows."""
        v = np.arange(1, 2 * _LENGTHS[-1] + 1) / 2
        best = np.full(len(self._side), np.inf)
        for some in _pieces(columns, len(v)):
            for side in (1.0, -1.0):
                for bend in (*8.0 ** np.arange(14), np.inf):
                    fall = self._fall(v, some, *np.full((2, len(some)), [[side], [bend]]))
                    down = fall < -_DEPTH
                    first = np.where(down.any(-1), down.argmax(-1), len(v) - 1)
                    before = np.where(np.arange(len(v)) <= first[:, None], fall, -np.inf).max(-1)
                    cost = v[first] + 1e3 * np.maximum(before - _GROWTH, 0.0)
                    better = cost < best[some]
                    chosen = some[better]
                    best[chosen], self._side[chosen], self._bend[chosen] = cost[better], side, bend
                    self._level[chosen] = np.searchsorted(_LENGTHS, v[first[better]])


def _bent(v: Array, side: Array, bend: Array) -> tuple[Array, Array, Array]:
    """x, y and dx / dy at v."""
    y = np.sinh(v)
    root = np.sqrt(y * y + bend * bend)
    towards = _TILT * side
    return towards * y * (y / (root + bend)), y, towards * (y / root)


def _pieces(columns: Columns, nodes: int) -> Iterator[Columns]:
    size = max(1, _CHUNK // nodes)
    for first in range(0, len(columns), size):
        yield columns[first : first + size]
