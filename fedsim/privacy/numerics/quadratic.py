"""δ where the log-likelihood ratio is a quadratic form in independent normal numbers.

That is the case of any two normal distributions (Lu et al., The Normal Distributions
Indistinguishability Spectrum, Theorem 1): with ψ = Σ_j (a_j |Z_j|² / 2 + b_j . Z_j) + c, where Z_j
has m_j entries and a_j < 1, δ(ε) = E[(1 - exp(ψ))+]; E[exp(ψ)] = exp(ε) fixes c.

With L = ε - ψ the log-likelihood ratio and K(s) = log E[exp(s L)], δ is the contour integral of
exp(K(s) - s ε) / (s (1 + s)) / (2 π i) upwards to the right of 0, since the Laplace transform of
(1 - exp(ε - L))+ in ε is exp(s L) / (s (1 + s)). The path (`contour`) crosses the real axis in the
integrand's saddle point, where nothing cancels however small δ is. Where ε is far below the
Kullback-Leibler divergence K'(0), it crosses between -1 and 0 instead: that gives 1 - δ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics import contour
from fedsim.privacy.numerics.special import Array, solve

Columns = NDArray[Any]
_ENDS = 700.0
"""The saddle point is looked for at e^-700 to e^700 from 0."""
_NEARNESS = 0.05
"""How far from the saddle point the path may cross the real axis, in widths of the saddle."""
_RESOLUTION = 1e-15
"""Steps towards the saddle point below which rounding allows no further one."""
_FAR = 1e12


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
    a, rest, shift, count = (
        np.ascontiguousarray(np.broadcast_to(x, shape).reshape(-1, shape[-1]).T) for x in given
    )
    idle = (shift == 0) & (count == 0)
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
    found = np.where(np.isnan(falling(found)[0]), np.nan, found)  # or it would look like a root
    return np.where(falling(np.zeros(shape))[0] >= 0, 0.0, found)[()]


@dataclass(frozen=True)
class _Form:
    """Quadratic forms, one in each column; `eps` has shape (N,), the others (groups, N)."""

    a: Array
    rest: Array
    shift: Array
    count: Array
    log_rest: Array
    """log(1 - a)."""
    eps: Array

    @classmethod
    def of(cls, a: Array, rest: Array, shift: Array, count: Array, eps: Array) -> _Form:
        """With `log_rest` from whichever of a and 1 - a tells more of it."""
        log_rest = np.where(np.abs(a) < 0.5, np.log1p(-a), np.log(rest))
        return cls(a, rest, shift, count, log_rest, eps)

    def take(self, some: Columns) -> _Form:
        return _Form(*(getattr(self, name)[..., some] for name in self.__dataclass_fields__))

    def divergence(self) -> Array:
        """K'(0), the Kullback-Leibler divergence of the first distribution from the second."""
        each: Array = -self.count * (self.log_rest + self.a) + self.shift / self.rest
        return np.asarray(each.sum(0) / 2)

    def variance(self) -> Array:
        """K''(0), the variance of L under the first distribution."""
        return np.asarray((self.count * self.a**2 / 2 + self.shift).sum(0))

    def most(self) -> Array:
        """The supremum of -ψ; where it is not positive, δ is 0."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            squares = np.where(self.shift > 0, self.shift / (self.a * self.rest), 0.0)
            highest = (squares - self.count * self.log_rest).sum(0) / 2 - self.eps
        bounded = np.where(self.count > 0, self.a >= 0, self.shift == 0).all(0)
        return np.where(bounded, highest, np.inf)


@dataclass(frozen=True)
class _Saddle:
    """Where the path crosses the real axis, and how the integrand behaves around it."""

    s: Array
    beyond: Array
    """1 + s"""
    w: Array
    """1 + s a_j, of shape (groups, N)."""
    slope: Array
    """The derivative of the integrand's logarithm."""
    curvature: Array
    """And the second derivative."""

    def take(self, some: Columns) -> _Saddle:
        return _Saddle(*(getattr(self, name)[..., some] for name in self.__dataclass_fields__))

    def log_integrand(self, form: _Form) -> Array:
        value = (form.count * (-self.s * form.log_rest - np.log(self.w)) / 2).sum(0)
        value += (form.shift / form.rest * (self.s * self.beyond) / self.w / 2).sum(0)
        return np.asarray(value - self.s * form.eps - np.log(np.abs(self.s)) - np.log(self.beyond))


def _log_delta(form: _Form) -> tuple[Array, Array]:
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
                integral, offset = contour.integral(_integrand(part, saddle, near, width))
                log_integral[near] += np.log(integral * width / np.pi)
                mean[near] += offset * width
            if sign > 0:
                value[some], slope[some] = log_integral, -mean
            else:
                complement = np.minimum(np.exp(log_integral), 1.0)
                value[some] = np.log1p(-complement)
                slope[some] = mean * complement / (1 - complement)
    return np.minimum(value, 0.0), slope


def _saddle(form: _Form, sign: float) -> _Saddle:
    """Close to the minimum of the integrand in (0, the first singularity), or (-1, 0) if sign < 0.

    Newton's method from where it would be if L were normal, and bisection where that fails. It
    stops in the width of the saddle, since the path need not cross in the very minimum.
    """
    # s = ± e^y / (1 + g e^y) keeps 1 + s a_j free of cancellation up to the singularity 1 / g.
    g = np.maximum(-form.a.min(0), 0.0) if sign > 0 else np.ones(form.eps.shape)
    pull = g + form.a if sign > 0 else form.rest

    def at(y: Array, some: Columns) -> tuple[_Saddle, Array]:
        """And |ds / dy|."""
        grown = np.exp(y)
        q = 1 / (1 + g[some] * grown)
        s = sign * grown * q
        beyond = 1 + s if sign > 0 else q
        w = q * (1 + grown * pull[:, some])
        ratio, count, shift = form.a[:, some] / w, form.count[:, some], form.shift[:, some]
        slope = (count * (-form.log_rest[:, some] - ratio)).sum(0) / 2
        slope += (shift / form.rest[:, some] * (beyond + s * w) / w**2).sum(0) / 2
        slope -= form.eps[some] + 1 / s + 1 / beyond
        curvature = (count * ratio**2 / 2 + shift / w**3).sum(0) + 1 / s**2 + 1 / beyond**2
        return _Saddle(s, beyond, w, slope, curvature), grown * q * q

    excess, variance = form.divergence() - form.eps, form.variance()
    root = np.sqrt(excess**2 + 4 * variance)
    guess = np.where(excess < 0, (root - excess) / (2 * variance), 2 / (root + excess))
    y = np.clip(np.nan_to_num(np.log(guess)), -_ENDS, _ENDS)
    low, high = np.full(y.shape, -_ENDS), np.full(y.shape, _ENDS)
    last, before = high - low, high - low
    active = np.arange(len(y))
    while len(active):
        now = y[active]
        here, moved = at(now, active)
        value = sign * here.slope
        low[active] = np.where(value < 0, now, low[active])
        high[active] = np.where(value < 0, high[active], now)
        newton = now - value / (here.curvature * moved)
        good = (newton >= low[active]) & (newton <= high[active])
        good &= 2 * np.abs(newton - now) <= before[active]
        new = np.where(good, newton, (low[active] + high[active]) / 2)
        before[active], last[active] = last[active], np.abs(new - now)
        done = np.abs(value) < _NEARNESS * np.sqrt(here.curvature)
        y[active] = np.where(done, now, new)
        active = active[~done & (last[active] > _RESOLUTION)]
    return at(y, np.arange(len(y)))[0]


def _integrand(form: _Form, saddle: _Saddle, some: Columns, width: Array) -> contour.Integrand:
    """exp(K(s) - s ε) / (s (1 + s)) over its value in the saddle, around it."""
    w, half = saddle.w[:, some], form.count[:, some] / 2
    poles = width / np.stack([saddle.s[some], saddle.beyond[some]])
    return contour.Integrand(
        slope=width * saddle.slope[some],
        reach=np.concatenate([width * form.a[:, some] / w, poles]),
        power=np.concatenate([half, np.ones_like(poles)]),
        bulk=np.concatenate([form.shift[:, some] * width**2 / w**3 / 2, np.zeros_like(poles)]),
    )
