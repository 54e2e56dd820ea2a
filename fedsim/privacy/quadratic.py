"""δ where the log-likelihood ratio is a quadratic form in independent normal numbers.

That is the case of any two normal distributions (Lu et al., The Normal Distributions
Indistinguishability Spectrum, Theorem 1): with ψ = Σ_j (a_j |Z_j|² / 2 + b_j . Z_j) + c, where Z_j
has m_j entries and a_j < 1, δ(ε) = E[(1 - exp(ψ))+]; E[exp(ψ)] = exp(ε) fixes c.

With L = ε - ψ the log-likelihood ratio and K(s) = log E[exp(s L)], δ is the contour integral of
exp(K(s) - s ε) / (s (1 + s)) / (2 π i) upwards to the right of 0, since the Laplace transform of
(1 - exp(ε - L))+ in ε is exp(s L) / (s (1 + s)). The path crosses the real axis in the integrand's
saddle point, where nothing cancels however small δ is, and bends to the side on which the
integrand falls; the trapezoid rule then converges geometrically (Trefethen and Weideman, The
Exponentially Convergent Trapezoidal Rule, SIAM Review 2014). Where ε is far below the
Kullback-Leibler divergence K'(0), the path crosses between -1 and 0 instead: that gives 1 - δ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics import Array, solve

Complex = NDArray[np.complex128]
Rows = NDArray[Any]
_TILT = 0.5
_DEPTH = 42.0
"""The path ends where the integrand has fallen by exp(-42)."""
_LONGEST = 45.0
_GROWTH = 1.0
"""The logarithm of the growth along a path beyond which another is looked for."""
_FAR = 1e12
_CHUNK = 1 << 20
"""Complex numbers that are held at a time, per array."""


def log_delta(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, epsilon: ArrayLike
) -> Array:
    """log δ at `epsilon` >= 0; the last axis of the first four counts the groups j.

    Args:
        a: a_j < 1, finite.
        rest: 1 - a_j, which may be known to more digits than a_j tells.
        shift: |b_j|² >= 0.
        count: m_j >= 0, the number of entries of Z_j.
        epsilon: of the shape of the others without their last axis; all broadcast.

    Returns:
        log δ, -inf where ε is at least the supremum of the log-likelihood ratio.
    """
    return log_delta_and_slope(a, rest, shift, count, epsilon)[0]


def log_delta_and_slope(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, epsilon: ArrayLike
) -> tuple[Array, Array]:
    """`log_delta`, and its derivative with respect to ε from the same integral."""
    given = [np.asarray(x, dtype=np.float64) for x in (a, rest, shift, count)]
    eps = np.asarray(epsilon, dtype=np.float64)
    shape = np.broadcast_shapes(*(x.shape for x in given), (*eps.shape, 1))
    flat = [np.broadcast_to(x, shape).reshape(-1, shape[-1]) for x in given]
    idle = (flat[2] == 0) & (flat[3] == 0)
    flat[:2] = np.where(idle, 0.0, flat[0]), np.where(idle, 1.0, flat[1])
    a, rest, shift, count = flat
    form = _Form(a, rest, shift, count, np.broadcast_to(eps, shape[:-1]).ravel())
    value, slope = np.full(form.eps.shape, -np.inf), np.full(form.eps.shape, -np.inf)
    live = form.most() > 0
    if live.any():
        value[live], slope[live] = _log_delta(form.take(live))
    return value.reshape(shape[:-1])[()], slope.reshape(shape[:-1])[()]


def epsilon(
    a: ArrayLike, rest: ArrayLike, shift: ArrayLike, count: ArrayLike, delta: ArrayLike
) -> Array:
    """The least ε >= 0 at which δ(ε) is at most `delta` in (0, 1); arguments as of `log_delta`."""
    target = np.log(np.asarray(delta, dtype=np.float64))
    given = (a, rest, shift, count)
    shape = np.broadcast_shapes(*(np.shape(x)[:-1] for x in given), target.shape)

    def falling(eps: Array) -> tuple[Array, Array]:
        value, slope = log_delta_and_slope(*given, eps)
        value, slope = np.maximum(value, -1e300), np.maximum(slope, -1e300)
        return target - value, -slope

    most = np.ones(shape)
    while (beyond := falling(most)[0] < 0).any():
        most = np.where(beyond, 2 * most, most)
    found = solve(falling, np.zeros(shape), most)
    return np.where(falling(np.zeros(shape))[0] >= 0, 0.0, found)[()]


@dataclass(frozen=True)
class _Form:
    """Quadratic forms, one in each row; `eps` has shape (N,), the others (N, groups)."""

    a: Array
    rest: Array
    shift: Array
    count: Array
    eps: Array

    def take(self, rows: Rows) -> _Form:
        return _Form(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def log_rest(self) -> Array:
        """log(1 - a)."""
        near = np.abs(self.a) < 0.5
        return np.asarray(np.where(near, np.log1p(-self.a), np.log(self.rest)))

    def divergence(self) -> Array:
        """K'(0), the Kullback-Leibler divergence of the first distribution from the second."""
        each: Array = -self.count * (self.log_rest + self.a) + self.shift / self.rest
        return np.asarray(each.sum(-1) / 2)

    def most(self) -> Array:
        """The supremum of -ψ; where it is not positive, δ is 0."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            squares = np.where(self.shift > 0, self.shift / (self.a * self.rest), 0.0)
        bounded = np.where(self.count > 0, self.a >= 0, self.shift == 0).all(-1)
        highest = (squares - self.count * self.log_rest).sum(-1) / 2 - self.eps
        return np.where(bounded, highest, np.inf)


@dataclass(frozen=True)
class _Saddle:
    """Where the path crosses the real axis, and how the integrand behaves around it."""

    s: Array
    beyond: Array
    """1 + s"""
    w: Array
    """1 + s a_j, of shape (N, groups)."""
    value: Array
    """log of the integrand."""
    slope: Array
    curvature: Array

    def take(self, rows: Rows) -> _Saddle:
        return _Saddle(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def _log_delta(form: _Form) -> tuple[Array, Array]:
    variance = (form.count * form.a**2 / 2 + form.shift).sum(-1)
    left = form.divergence() - form.eps > np.sqrt(variance) / 2
    value, slope = np.empty(form.eps.shape), np.empty(form.eps.shape)
    for rows, sign in ((left, -1.0), (~left, 1.0)):
        if rows.any():
            part = form.take(rows)
            saddle = _saddle(part, sign)
            # So far out the width of the saddle is below the rounding of its logarithm.
            log_integral, mean = saddle.value.copy(), saddle.s.copy()
            near = log_integral > -_FAR
            if near.any():
                log_integral[near], mean[near] = _integral(part.take(near), saddle.take(near))
            if sign > 0:
                value[rows], slope[rows] = log_integral, -mean
            else:
                complement = np.minimum(np.exp(log_integral), 1.0)
                value[rows] = np.log1p(-complement)
                slope[rows] = mean * complement / (1 - complement)
    return np.minimum(value, 0.0), slope


def _saddle(form: _Form, sign: float) -> _Saddle:
    """The minimum of the integrand in (0, the first singularity) or, for sign < 0, in (-1, 0)."""
    a, log_rest = form.a, form.log_rest
    spread = form.shift / form.rest
    # s = ± e^y / (1 + g e^y) keeps 1 + s a_j free of cancellation up to the singularity 1 / g.
    g = np.maximum(-a.min(-1), 0.0) if sign > 0 else np.ones(len(a))

    def at(y: Array) -> _Saddle:
        grown = np.exp(y)
        q = 1 / (1 + g * grown)
        s = sign * grown * q
        beyond = 1 + s if sign > 0 else q
        w = q[:, None] * (1 + grown[:, None] * (g[:, None] + a if sign > 0 else form.rest))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value = (form.count * (-s[:, None] * log_rest - np.log(w)) / 2).sum(-1)
            value += (spread * (s * beyond)[:, None] / w / 2).sum(-1)
            value -= s * form.eps + np.log(np.abs(s)) + np.log(beyond)
            slope = (form.count * (-log_rest - a / w) / 2).sum(-1) - form.eps - 1 / s - 1 / beyond
            slope += (spread * (1 + 2 * s[:, None] + a * s[:, None] ** 2) / w**2 / 2).sum(-1)
            curvature = (form.count * (a / w) ** 2 / 2 + form.shift / w**3).sum(-1)
            curvature += 1 / s**2 + 1 / beyond**2
        return _Saddle(s, beyond, w, value, slope, curvature)

    def rising(y: Array) -> tuple[Array, Array]:
        here = at(y)
        moved = np.abs(here.s) / (1 + g * np.exp(y))  # ds / dy, but for the sign
        return sign * here.slope, here.curvature * moved

    ends = np.full(len(a), 700.0)
    return at(solve(rising, -ends, ends, tolerance=1e-6))


def _integral(form: _Form, saddle: _Saddle) -> tuple[Array, Array]:
    """log of the integral over the path through the saddle point, and the mean of s under it."""
    path = _Path(form, saddle)
    nodes, every = 24, np.arange(len(form.eps))
    start = np.arange(1, nodes + 1) / nodes
    total, grown = path.sums(every, start)
    wrong = every[~(grown < _GROWTH)]
    if len(wrong):
        path.choose(wrong)
        total[:, wrong], _ = path.sums(wrong, start)
    total[0] += path.width / 2  # the saddle point itself, once for both halves of the path
    active, result = every, total[0] * path.long / nodes
    while len(active) and nodes < 1 << 16:
        total[:, active] += path.sums(active, (np.arange(nodes) + 0.5) / nodes)[0]
        nodes *= 2
        old, result[active] = result[active], total[0, active] * path.long[active] / nodes
        # The error is about squared by each halving: from 1e-9 it falls to rounding.
        active = active[np.abs(result[active] - old) > 1e-9 * np.abs(result[active])]
    return saddle.value + np.log(result / np.pi), saddle.s + total[1] / total[0]


class _Path:
    """s + z(v) for v >= 0: upwards, y = width sinh(v), bending to a `side` from y = `bend` on."""

    def __init__(self, form: _Form, saddle: _Saddle) -> None:
        self._form, self._saddle = form, saddle
        self.width = 1 / np.sqrt(saddle.curvature)
        # What is linear in z far out: the integrand falls to the side that this sum points from.
        with np.errstate(divide="ignore", invalid="ignore"):
            pulls = form.count * form.a / saddle.w / 2
            tails = np.where(form.shift > 0, form.shift / (2 * saddle.w**2 * form.a), 0.0)
        poles = np.stack([1 / saddle.s, 1 / saddle.beyond], axis=-1)
        pull = np.concatenate([pulls, tails, poles], axis=-1)
        self._side = -np.sign(np.nan_to_num(pull, posinf=1e300, neginf=-1e300).sum(-1))
        against = np.maximum(pull * self._side[:, None], 0.0).sum(-1)
        # Bent so late that what falls to the other side is outweighed by the saddle's own width.
        self._bend = np.maximum(self.width, 2 * _TILT * self.width**2 * against)
        self.long = np.zeros(len(self.width))
        self._end(np.arange(len(self.width)))

    def _at(self, v: Array, rows: Rows, side: Array, bend: Array) -> tuple[Complex, Complex]:
        """z and dz / dv / i of shape (rows, nodes)."""
        sigma, scale, towards = self.width[rows, None], bend[:, None], _TILT * side[:, None]
        y, dy = sigma * np.sinh(v), sigma * np.cosh(v)
        root = np.hypot(y, scale)
        with np.errstate(invalid="ignore"):
            across = np.where(np.isinf(scale), 0.0, towards * y * (y / (root + scale)))
            turn = np.where(np.isinf(scale), 0.0, towards * (y / root))
        return across + 1j * y, dy * (1 - 1j * turn)

    def _log_ratio(self, z: Complex, rows: Rows) -> Complex:
        """log of the integrand over its value in the saddle point, free of cancellation."""
        form, saddle = self._form.take(rows), self._saddle.take(rows)
        total = saddle.slope[:, None] * z
        for at in (saddle.s, saddle.beyond):
            x = z / at[:, None]
            total = total + x - np.log1p(x)
        for j in range(form.a.shape[1]):
            x = z * (form.a[:, j] / saddle.w[:, j])[:, None]
            if form.count[:, j].any():
                total = total + (form.count[:, j] / 2)[:, None] * (x - np.log1p(x))
            if form.shift[:, j].any():
                bulk = (form.shift[:, j] / (2 * saddle.w[:, j] ** 3))[:, None]
                total = total + bulk * z * (z / (1 + x))
        return total

    def _fall(self, v: Array, rows: Rows, side: Array, bend: Array) -> Array:
        """log of the integrand's size at v, relative to the saddle point."""
        z, dz = self._at(v, rows, side, bend)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            log_size = self._log_ratio(z, rows).real + np.log(np.abs(dz) / self.width[rows, None])
        return np.where(np.isnan(log_size), np.inf, log_size)

    def _end(self, rows: Rows) -> None:
        short, long = np.zeros(len(rows)), np.full(len(rows), _LONGEST)
        side, bend = self._side[rows], self._bend[rows]
        for _ in range(10):
            middle = (short + long) / 2
            fallen = self._fall(middle[:, None], rows, side, bend)[:, 0] < -_DEPTH
            short, long = np.where(fallen, short, middle), np.where(fallen, middle, long)
        self.long[rows] = long

    def choose(self, rows: Rows) -> None:
        """Try where else the path may bend; take the shortest on which nothing grows."""
        v = np.arange(1, 2 * _LONGEST + 1) / 2
        best = np.full(len(rows), np.inf)
        for side in (1.0, -1.0):
            for bend in (*8.0 ** np.arange(14), np.inf):
                sides, bends = np.full(len(rows), side), bend * self.width[rows]
                fall = self._fall(v, rows, sides, bends)
                down = fall < -_DEPTH
                first = np.where(down.any(-1), down.argmax(-1), len(v) - 1)
                before = np.where(np.arange(len(v)) <= first[:, None], fall, -np.inf).max(-1)
                cost = v[first] + 1e3 * np.maximum(before - _GROWTH, 0.0)
                better = cost < best
                best[better] = cost[better]
                chosen = rows[better]
                self._side[chosen], self._bend[chosen] = side, bends[better]
                self.long[chosen] = v[first[better]]

    def sums(self, rows: Rows, fractions: Array) -> tuple[Array, Array]:
        """Of the integrand and of the integrand times z over nodes; and how much it has grown."""
        total, grown = np.empty((2, len(rows))), np.empty(len(rows))
        size = max(1, _CHUNK // len(fractions))
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            some = rows[part]
            v = self.long[some, None] * fractions
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                z, dz = self._at(v, some, self._side[some], self._bend[some])
                log_ratio = self._log_ratio(z, some)
                values = np.exp(log_ratio) * dz
                total[0, part] = values.real.sum(-1)
                total[1, part] = (values * z).real.sum(-1)
            grown[part] = log_ratio.real.max(-1)
        return total, grown
