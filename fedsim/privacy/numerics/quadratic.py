"""δ where the log-likelihood ratio is a quadratic form in independent normal numbers.

That is the case of any two normal distributions (Lu et al., The Normal Distributions
Indistinguishability Spectrum, Theorem 1): with ψ = Σ_j (a_j |Z_j|² / 2 + b_j . Z_j) + c, where Z_j
has m_j entries and a_j < 1, δ(ε) = E[(1 - exp(ψ))+]; E[exp(ψ)] = exp(ε) fixes c.

With L = ε - ψ the log-likelihood ratio and K(s) = log E[exp(s L)], δ is the contour integral of
exp(K(s) - s ε) / (s (1 + s)) / (2 π i) upwards to the right of 0, since the Laplace transform of
(1 - exp(ε - L))+ in ε is exp(s L) / (s (1 + s)). The path crosses the real axis in the
integrand's saddle point, where nothing cancels however small δ is. Where ε is far below the
Kullback-Leibler divergence K'(0), it crosses between -1 and 0 instead: that gives 1 - δ.

Around a saddle point the integrand (`_Integrand`) is exp(E), E(z) = slope z + Σ_j [power_j (reach_j
z - log(1 + reach_j z)) + bulk_j z² / (1 + reach_j z)], with its saddle point close to z = 0 and z
in units of the saddle's width there: |slope| is small and E'' is 1. The path goes upwards from 0, z
= y i + x(y), with y = sinh(v), and bends to the side on which the integrand falls; the trapezoid
rule in v then converges geometrically (Trefethen and Weideman, The Exponentially Convergent
Trapezoidal Rule, SIAM Review 2014), so that half of the nodes tell how good all of them are. The
integrand is real on the real axis, which makes the lower half of the path the mirror image of the
upper one.

All numbers are kept as real and imaginary parts: NumPy's real functions are many times as fast as
its complex ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics.special import Array, solve

Columns = NDArray[Any]
_TILT = 0.7
"""|dx / dy| of the path far out."""
_SHARPEST = 1.0
"""Least bend of a path by its skewness, in widths of the saddle."""
_LONG = 6.0
"""The length beyond which another bend may be shorter."""
_DEPTH = 42.0
"""The path ends where the integrand has fallen by exp(-42)."""
_LENGTHS = np.geomspace(2.8, 45.0, 32)
_DENSITY = 9.0
"""Nodes per length at first: enough for nearly all integrands."""
_MOST = 1 << 16
"""Nodes beyond which an integral is not refined."""
_AGREEMENT = 1e-12
"""Relative agreement of all nodes with half of them. At 1e-9 one of 10^5 agrees by chance, wrong
by 7e-9."""
_GROWTH = 1.0
"""The growth of E along a path beyond which another is looked for."""
_CHUNK = 1 << 15
"""Numbers that are held at a time, per array: few enough to stay in the cache."""


@dataclass(frozen=True)
class _Integrand:
    """Integrands exp(E), one in each column: `slope` has shape (N,), the others (terms, N).

    The fields are the coefficients of E in the module's docstring: row j of `power` is power_j.
    """

    slope: Array
    reach: Array
    power: Array
    bulk: Array

    @cached_property
    def _linear(self) -> Array:
        return np.asarray(self.slope + (self.power * self.reach).sum(0))

    @cached_property
    def _present(self) -> list[tuple[bool, bool]]:
        """Whether any column has each term as a power, and as a fraction."""
        return [(bool(p.any()), bool(b.any())) for p, b in zip(self.power, self.bulk, strict=True)]

    def log(self, x: Array, y: Array, some: Columns) -> tuple[Array, Array]:
        """Computes real and imaginary part of E at x + i y (columns, nodes), of `some` columns."""
        linear = self._linear[some, None]
        size, phase = linear * x, linear * y
        for j, (powers, bulks) in enumerate(self._present):
            reach = self.reach[j, some, None]
            u, v = reach * x, reach * y
            excess = u * (2 + u) + v * v  # |1 + reach z|² - 1
            u += 1
            if powers:
                power = self.power[j, some, None]
                # log(1 + reach z), by modulus and angle.
                size -= (power / 2) * np.log1p(excess)
                phase -= power * np.arctan2(v, u)
            if bulks:
                # z² / (1 + reach z) is z² times the conjugate of 1 +
                # reach z, over its squared modulus.
                share = self.bulk[j, some, None] / (1 + excess)
                real, imaginary = x * x - y * y, 2 * x * y
                size += share * (real * u + imaginary * v)
                phase += share * (imaginary * u - real * v)
        return size, phase


def _integral(of: _Integrand) -> tuple[Array, Array]:
    """Computes (N,) ∫ exp(E(z)) dz / (2 i) along the whole path, and the mean of z under exp(E)."""
    path = _Path(of)
    every = np.arange(len(of.slope))
    total, grown = np.empty((2, len(every))), np.empty(len(every))
    # Nearly all integrands fall along the first path. Only the others, or NaN, pay for a search.
    path.sum(every, total, grown, _GROWTH)
    wrong = every[~(grown < _GROWTH)]
    if len(wrong):
        path.choose(wrong)
        path.sum(wrong, total, grown, np.inf)
    return total[0], total[1] / total[0]


class _Path:
    """x + i y, y = sinh(v) for v from 0 to a length, with x bending to a `side` from `bend` on."""

    def __init__(self, of: _Integrand) -> None:
        self._of = of
        # Where z is small, that of steepest descent is x = skewness y².
        skewness = -(of.reach * (of.power * of.reach**2 / 3 + of.bulk)).sum(0)
        self._side = np.sign(skewness)
        with np.errstate(divide="ignore"):
            # Close to 0 the path is x = side _TILT y² / (2 bend):
            # this bend makes that the steepest descent.
            self._bend = np.maximum(_SHARPEST, _TILT / 2 / np.abs(skewness))
        self._level = self._ends(np.arange(len(of.slope)), self._side, self._bend)
        """Index of the path's length among `_LENGTHS`."""
        self._shorten(np.flatnonzero(_LENGTHS[self._level] > _LONG))

    def _shorten(self, columns: Columns) -> None:
        """Bends paths by what is linear in z far out, where that makes them shorter."""
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
        """Writes integrals of exp(E) and of z exp(E) to `total`, and how far E rises to `grown`."""
        for level in np.unique(self._level[columns]):
            length = _LENGTHS[level]
            alike = columns[self._level[columns] == level]
            # An even number, so that every second node is the same rule with half of them.
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
                # Halving the step adds the midpoints; what is summed already is kept.
                fresh = self._values(length * (np.arange(nodes) + 0.5) / nodes, some[part])[1:]
                sums[:, part] += [each.sum(-1) for each in fresh]
            nodes *= 2
            new = sums[0]
            total[:, some] = sums * (length / nodes)

    def _values(self, v: Array, some: Columns) -> tuple[Array, Array, Array]:
        """Returns E's real part, and the real parts of exp(E) dz / (i dv) and of z times that."""
        with np.errstate(over="ignore", invalid="ignore"):
            x, y, turn = _bend_path(v, self._side[some, None], self._bend[some, None])
            size, phase = self._of.log(x, y, some)
            weight = np.exp(size) * np.cosh(v)
            cosine, sine = np.cos(phase), np.sin(phase)
            # dz = (1 - i dx/dy) i dy, and dy = cosh(v) dv, which is in the weight.
            values = weight * (cosine + turn * sine)
            moments = values * x - weight * (sine - turn * cosine) * y
        return size, values, moments

    def _fall(self, v: Array, some: Columns, side: Array, bend: Array) -> Array:
        """Returns log of the integrand's size by v, relative to the saddle point."""
        with np.errstate(over="ignore", invalid="ignore"):
            x, y, _ = _bend_path(v, side[:, None], bend[:, None])
            size = self._of.log(x, y, some)[0] + np.log(np.cosh(v))
        # ∞ - ∞ far out counts as growth, so that no path is chosen for it.
        return np.where(np.isnan(size), np.inf, size)

    def _ends(self, columns: Columns, side: Array, bend: Array) -> Columns:
        """Finds the least level at which the integrand has fallen, if it is falling all the way."""
        ends = np.empty(len(columns), dtype=np.intp)
        for part in _pieces(np.arange(len(columns)), 1):
            short, long = np.full(len(part), -1), np.full(len(part), len(_LENGTHS) - 1)
            # Bisection over the lengths: right only if the integrand
            # falls all the way, as the caller finds out.
            for _ in range(len(_LENGTHS).bit_length() - 1):
                middle = (short + long) // 2
                v = _LENGTHS[middle, None]
                fallen = self._fall(v, columns[part], side[part], bend[part])[:, 0] < -_DEPTH
                short, long = np.where(fallen, short, middle), np.where(fallen, middle, long)
            ends[part] = long
        return ends

    def choose(self, columns: Columns) -> None:
        """Tries other bends of the path for `columns`; takes the shortest where nothing grows."""
        v = np.arange(1, 2 * _LENGTHS[-1] + 1) / 2
        best = np.full(len(self._side), np.inf)
        for some in _pieces(columns, len(v)):
            for side in (1.0, -1.0):
                for bend in (*8.0 ** np.arange(14), np.inf):
                    fall = self._fall(v, some, *np.full((2, len(some)), [[side], [bend]]))
                    down = fall < -_DEPTH
                    first = np.where(down.any(-1), down.argmax(-1), len(v) - 1)
                    before = np.where(np.arange(len(v)) <= first[:, None], fall, -np.inf).max(-1)
                    # Growth costs more than any length: a path on which E
                    # grows is taken only for want of others.
                    cost = v[first] + 1e3 * np.maximum(before - _GROWTH, 0.0)
                    better = cost < best[some]
                    chosen = some[better]
                    best[chosen], self._side[chosen], self._bend[chosen] = cost[better], side, bend
                    self._level[chosen] = np.searchsorted(_LENGTHS, v[first[better]])


def _bend_path(v: Array, side: Array, bend: Array) -> tuple[Array, Array, Array]:
    y = np.sinh(v)
    root = np.sqrt(y * y + bend * bend)
    towards = _TILT * side
    # sqrt(y² + bend²) - bend without its cancellation; a bend of ∞ gives the vertical line.
    return towards * y * (y / (root + bend)), y, towards * (y / root)


def _pieces(columns: Columns, nodes: int) -> Iterator[Columns]:
    size = max(1, _CHUNK // nodes)
    for first in range(0, len(columns), size):
        yield columns[first : first + size]


_ENDS = 700.0
"""The saddle point is looked for at e^-700 to e^700 from 0."""
_NEARNESS = 0.05
"""Largest distance of the path's crossing from the saddle point, in widths of the saddle."""
_RESOLUTION = 1e-15
"""Steps towards the saddle point below which rounding allows no further one."""
_FAR = 1e12
"""-log of an integrand's peak from which on its width is lost in rounding."""


def log_delta(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, epsilon: ArrayLike
) -> Array:
    """Computes ln δ(ε), in the shape of `epsilon`, where δ(ε) = E[(1 - exp(ψ))+].

    ψ is Σ_j (a_j |Z_j|² / 2 + b_j . Z_j) + c, with Z_j of m_j standard normal numbers; E[exp(ψ)] =
    exp(ε) fixes c. The last axis of all but `epsilon` counts the groups j. Nothing is checked.

    Args:
        a: a_j < 1, finite.
        rest: 1 - a_j, which may be known to more digits than a_j tells.
        shift: |b_j|² >= 0.
        count: m_j >= 0, the number of entries of Z_j.
        epsilon: at least 0, of the shape of the others without their last axis; all broadcast.
    """
    return _log_delta_and_slope(a, rest, shift, count, epsilon)[0]


def _log_delta_and_slope(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, epsilon: ArrayLike
) -> tuple[Array, Array]:
    """Computes (`log_delta`, its derivative with respect to ε), from the same integral."""
    given = [np.asarray(x, dtype=np.float64) for x in (a, rest, shift, count)]
    eps = np.asarray(epsilon, dtype=np.float64)
    shape = np.broadcast_shapes(*(x.shape for x in given), (*eps.shape, 1))
    a, rest, shift, count = (
        np.ascontiguousarray(np.broadcast_to(x, shape).reshape(-1, shape[-1]).T) for x in given
    )
    idle = (shift == 0) & (count == 0)
    # A group without entries or shift must not limit how far the saddle point may lie.
    a, rest = np.where(idle, 0.0, a), np.where(idle, 1.0, rest)
    form = _Form.of(a, rest, shift, count, np.broadcast_to(eps, shape[:-1]).ravel())
    value, slope = np.full(form.eps.shape, -np.inf), np.full(form.eps.shape, -np.inf)
    live = form.most() > 0
    if live.any():
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value[live], slope[live] = _log_delta(form.take(live))
    return value.reshape(shape[:-1])[()], slope.reshape(shape[:-1])[()]


def epsilon(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, delta: ArrayLike
) -> Array:
    """Computes the least ε >= 0 at which δ(ε) of `log_delta` is at most `delta`, in its shape.

    It is NaN where the integral cannot be computed.

    Args:
        a: as of `log_delta`, like the next three.
        rest: 1 - a_j.
        shift: |b_j|² >= 0.
        count: m_j >= 0.
        delta: above 0, of the shape of the others without their last axis; all broadcast.
    """
    target = np.log(np.asarray(delta, dtype=np.float64))
    given = (a, rest, shift, count)
    shape = np.broadcast_shapes(*(np.shape(x)[:-1] for x in given), target.shape)

    def falling(eps: Array) -> tuple[Array, Array]:
        value, slope = _log_delta_and_slope(*given, eps)
        # Newton's steps need finite numbers, and log δ may be -∞.
        value, slope = np.maximum(value, -1e300), np.maximum(slope, -1e300)
        return target - value, -slope

    most = np.ones(shape)
    while (beyond := falling(most)[0] < 0).any():
        most = np.where(beyond, 2 * most, most)
    found = solve(falling, np.zeros(shape), most)
    found = np.where(np.isnan(falling(found)[0]), np.nan, found)  # or it would look like a root
    return np.where(falling(np.zeros(shape))[0] >= 0, 0.0, found)[()]


@dataclass(frozen=True)
class _Form:
    """Quadratic forms, one in each column; `eps` has shape (N,), the others (groups, N)."""

    a: Array
    rest: Array
    shift: Array
    count: Array
    log_rest: Array  # log(1 - a)
    eps: Array

    @classmethod
    def of(cls, a: Array, rest: Array, shift: Array, count: Array, eps: Array) -> _Form:
        # From whichever of a and 1 - a tells more of it.
        log_rest = np.where(np.abs(a) < 0.5, np.log1p(-a), np.log(rest))
        return cls(a, rest, shift, count, log_rest, eps)

    def take(self, some: Columns) -> _Form:
        return _Form(*(getattr(self, name)[..., some] for name in self.__dataclass_fields__))

    def divergence(self) -> Array:
        """Computes K'(0), the Kullback-Leibler divergence of the first from the second."""
        each: Array = -self.count * (self.log_rest + self.a) + self.shift / self.rest
        return np.asarray(each.sum(0) / 2)

    def variance(self) -> Array:
        """Computes K''(0)."""
        return np.asarray((self.count * self.a**2 / 2 + self.shift).sum(0))

    def most(self) -> Array:
        """Computes the supremum of -ψ; where it is not positive, δ is 0."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # A shift without a square (a = 0) is divided by 0: ∞, as is right for a linear term.
            squares = np.where(self.shift > 0, self.shift / (self.a * self.rest), 0.0)
            highest = (squares - self.count * self.log_rest).sum(0) / 2 - self.eps
        bounded = np.where(self.count > 0, self.a >= 0, self.shift == 0).all(0)
        return np.where(bounded, highest, np.inf)


@dataclass(frozen=True)
class _Saddle:
    """The point where the path crosses the real axis, and the integrand's behaviour around it."""

    s: Array
    beyond: Array  # 1 + s
    w: Array  # 1 + s a_j, of shape (groups, N)
    slope: Array  # the derivative of the integrand's logarithm
    curvature: Array  # the second derivative of the integrand's logarithm

    def log_integrand(self, form: _Form) -> Array:
        value = (form.count * (-self.s * form.log_rest - np.log(self.w)) / 2).sum(0)
        value += (form.shift / form.rest * (self.s * self.beyond) / self.w / 2).sum(0)
        return np.asarray(value - self.s * form.eps - np.log(np.abs(self.s)) - np.log(self.beyond))


def _log_delta(form: _Form) -> tuple[Array, Array]:
    # Far below the mean of L δ is close to 1, and 1 - δ is the number that keeps its digits.
    left = form.divergence() - form.eps > np.sqrt(form.variance()) / 2
    value, slope = np.empty(form.eps.shape), np.empty(form.eps.shape)
    for some, sign in ((left, -1.0), (~left, 1.0)):
        if some.any():
            part = form.take(some)
            saddle = _saddle(part, sign)
            log_integral, mean = saddle.log_integrand(part), saddle.s.copy()
            # So far out the width of the saddle is below the rounding of its logarithm.
            near = log_integral > -_FAR
            if near.any():
                width = 1 / np.sqrt(saddle.curvature[near])
                area, offset = _integral(_integrand(part, saddle, near, width))
                log_integral[near] += np.log(area * width / np.pi)
                mean[near] += offset * width
            if sign > 0:
                # ε enters the integrand by exp(-s ε) alone: the
                # slope of log δ is minus the mean of s.
                value[some], slope[some] = log_integral, -mean
            else:
                complement = np.minimum(np.exp(log_integral), 1.0)
                value[some] = np.log1p(-complement)
                slope[some] = mean * complement / (1 - complement)
    return np.minimum(value, 0.0), slope


def _saddle(form: _Form, sign: float) -> _Saddle:
    """Finds a point near the integrand's minimum in (0, first singularity), or in (-1, 0)."""
    # s = ± e^y / (1 + g e^y) keeps 1 + s a_j free of cancellation up to the singularity 1 / g.
    g = np.maximum(-form.a.min(0), 0.0) if sign > 0 else np.ones(form.eps.shape)
    # 1 + s a is q (1 + e^y (g + a)) for s > 0 and q (1 + e^y (1 - a)) for s < 0.
    pull = g + form.a if sign > 0 else form.rest

    def at(y: Array, some: Columns) -> tuple[_Saddle, Array]:
        """Returns the integrand's behaviour at s(y), and |ds / dy|."""
        grown = np.exp(y)
        q = 1 / (1 + g[some] * grown)
        s = sign * grown * q
        beyond = 1 + s if sign > 0 else q
        w = q * (1 + grown * pull[:, some])
        # First and second derivative of K(s) - s ε - log|s| - log(1 + s), group by group.
        ratio, count, shift = form.a[:, some] / w, form.count[:, some], form.shift[:, some]
        slope = (count * (-form.log_rest[:, some] - ratio)).sum(0) / 2
        slope += (shift / form.rest[:, some] * (beyond + s * w) / w**2).sum(0) / 2
        slope -= form.eps[some] + 1 / s + 1 / beyond
        curvature = (count * ratio**2 / 2 + shift / w**3).sum(0) + 1 / s**2 + 1 / beyond**2
        return _Saddle(s, beyond, w, slope, curvature), grown * q * q

    # Newton's method from where the minimum would be if L were normal, and bisection where that
    # fails. It stops in the width of the saddle, since the path need not cross in the very minimum.
    excess, variance = form.divergence() - form.eps, form.variance()
    root = np.sqrt(excess**2 + 4 * variance)
    # The root of variance s² + excess s = 1, in the form whose terms do not cancel.
    guess = np.where(excess < 0, (root - excess) / (2 * variance), 2 / (root + excess))
    y = np.clip(np.nan_to_num(np.log(guess)), -_ENDS, _ENDS)
    low, high = np.full(y.shape, -_ENDS), np.full(y.shape, _ENDS)
    last, before = high - low, high - low
    active = np.arange(len(y))
    while len(active):
        now = y[active]
        here, moved = at(now, active)
        # The sign makes it rise with y on either side of 0.
        value = sign * here.slope
        low[active] = np.where(value < 0, now, low[active])
        high[active] = np.where(value < 0, high[active], now)
        newton = now - value / (here.curvature * moved)
        good = (newton >= low[active]) & (newton <= high[active])
        good &= 2 * np.abs(newton - now) <= before[active]
        new = np.where(good, newton, (low[active] + high[active]) / 2)
        before[active], last[active] = last[active], np.abs(new - now)
        # The slope over the root of the curvature is the
        # distance to the saddle point, in its widths.
        done = np.abs(value) < _NEARNESS * np.sqrt(here.curvature)
        y[active] = np.where(done, now, new)
        active = active[~done & (last[active] > _RESOLUTION)]
    return at(y, np.arange(len(y)))[0]


def _integrand(form: _Form, saddle: _Saddle, some: Columns, width: Array) -> _Integrand:
    """Builds exp(K(s) - s ε) / (s (1 + s)) over its value in the saddle, in units of its width."""
    w, half = saddle.w[:, some], form.count[:, some] / 2
    poles = width / np.stack([saddle.s[some], saddle.beyond[some]])
    return _Integrand(
        slope=width * saddle.slope[some],
        reach=np.concatenate([width * form.a[:, some] / w, poles]),
        power=np.concatenate([half, np.ones_like(poles)]),
        bulk=np.concatenate([form.shift[:, some] * width**2 / w**3 / 2, np.zeros_like(poles)]),
    )
