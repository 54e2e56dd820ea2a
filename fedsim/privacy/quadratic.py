"""δ where the log-likelihood ratio is a quadratic form in independent normal numbers.

That is the case of any two normal distributions (Lu et al., The Normal Distributions
Indistinguishability Spectrum, Theorem 1): with ψ = Σ_j (a_j |Z_j|² / 2 + b_j . Z_j) + c, where Z_j
has m_j entries and a_j < 1, δ(ε) = E[(1 - exp(ψ))+]; E[exp(ψ)] = exp(ε) fixes c.

With K(s) = log E[exp(s (ε - ψ))], δ is the contour integral of exp(K(s) - s ε) / (s (1 + s)) /
(2 π i) upwards to the right of 0 (the Laplace transform of (1 - exp(ε - L))+ in ε). Its path crosses
the real axis in the integrand's saddle point, where nothing cancels however small δ is, and
bends to the side on which the integrand falls; the trapezoid rule then converges geometrically
(Rice, SIAM J. Sci. Stat. Comput. 1980, for quadratic forms; Trefethen and Weideman, SIAM Review
2014). Where ε is far below the divergence K'(0) = KL, the path crosses between -1 and 0 instead,
which gives 1 - δ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics import Array, solve

Complex = NDArray[np.complex128]
_TILT = 0.5
_DEPTH = 42.0
"""The path ends where the integrand has fallen by exp(-42)."""
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
    form = _Form(*flat, np.broadcast_to(eps, shape[:-1]).ravel())
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

    def take(self, rows: NDArray[Any]) -> _Form:
        return _Form(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def log_rest(self) -> Array:
        """log(1 - a)."""
        return np.where(np.abs(self.a) < 0.5, np.log1p(-self.a), np.log(self.rest))

    def divergence(self) -> Array:
        """K'(0), the Kullback-Leibler divergence of the first distribution from the second."""
        return (-self.count * (self.log_rest + self.a) + self.shift / self.rest).sum(-1) / 2

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

    def take(self, rows: NDArray[Any]) -> _Saddle:
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
    width = 1 / np.sqrt(saddle.curvature)
    with np.errstate(divide="ignore", invalid="ignore"):
        pulls = form.count * form.a / saddle.w / 2
        tails = np.where(form.shift > 0, form.shift / (2 * saddle.w**2 * form.a), 0.0)
    poles = np.stack([1 / saddle.s, 1 / saddle.beyond], axis=-1)
    each = np.concatenate([pulls, tails, poles], axis=-1)
    towards = -np.sign(np.nan_to_num(each, posinf=1e300, neginf=-1e300).sum(-1))
    against = np.maximum(each * towards[:, None], 0.0).sum(-1)
    bend = np.maximum(width, 2 * _TILT * width**2 * against)

    def path(v: Array, rows: NDArray[Any]) -> tuple[Complex, Complex]:
        """z and dz / dv / i of shape (rows, nodes)."""
        sigma, scale, side = (x[rows, None] for x in (width, bend, _TILT * towards))
        y, dy = sigma * np.sinh(v), sigma * np.cosh(v)
        root = np.hypot(y, scale)
        with np.errstate(invalid="ignore"):
            across = np.where(np.isinf(scale), 0.0, side * y * (y / (root + scale)))
            turn = np.where(np.isinf(scale), 0.0, side * (y / root))
        return across + 1j * y, dy * (1 - 1j * turn)

    def log_ratio(z: Complex, rows: NDArray[Any]) -> Complex:
        """log of the integrand over its value in the saddle point."""
        part, here = form.take(rows), saddle.take(rows)
        total = here.slope[:, None] * z
        for at in (here.s, here.beyond):
            x = z / at[:, None]
            total = total + x - np.log1p(x)
        for j in range(part.a.shape[1]):
            x = z * (part.a[:, j] / here.w[:, j])[:, None]
            if part.count[:, j].any():
                total = total + (part.count[:, j] / 2)[:, None] * (x - np.log1p(x))
            if part.shift[:, j].any():
                bulk = (part.shift[:, j] / (2 * here.w[:, j] ** 3))[:, None]
                total = total + bulk * z * (z / (1 + x))
        return total

    every = np.arange(len(width))
    short, long = np.zeros(len(width)), np.full(len(width), 45.0)
    for _ in range(10):
        middle = (short + long) / 2
        z, dz = path(middle[:, None], every)
        fallen = (log_ratio(z, every).real + np.log(np.abs(dz) / width[:, None]))[:, 0] < -_DEPTH
        short, long = np.where(fallen, short, middle), np.where(fallen, middle, long)

    def sums(rows: NDArray[Any], fractions: Array) -> Array:
        """Sums over the nodes of the integrand and of the integrand times z."""
        total = np.empty((2, len(rows)))
        size = max(1, _CHUNK // len(fractions))
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            z, dz = path(long[some, None] * fractions, some)
            values = np.exp(log_ratio(z, some)) * dz
            total[0, first : first + size] = values.real.sum(-1)
            total[1, first : first + size] = (values * z).real.sum(-1)
        return total

    nodes = 24
    total = sums(every, np.arange(1, nodes + 1) / nodes)
    total[0] += width / 2  # the saddle point itself, once for both halves of the path
    active, result = every, total[0] * long / nodes
    while len(active) and nodes < 1 << 16:
        total[:, active] += sums(active, (np.arange(nodes) + 0.5) / nodes)
        nodes *= 2
        old, result[active] = result[active], total[0, active] * long[active] / nodes
        # The error is about squared by each halving: from 1e-9 it falls to rounding.
        active = active[np.abs(result[active] - old) > 1e-9 * np.abs(result[active])]
    return saddle.value + np.log(result / np.pi), saddle.s + total[1] / total[0]
