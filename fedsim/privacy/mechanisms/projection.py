"""The exact privacy curve of Gaussian random projection: the release of D'G.

Source: Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum and
its Application to Privacy-Preserving Machine Learning, Theorem 2. G is an n x r matrix of standard
normal numbers; the neighbour lacks one row of D, whose leverage v'(D'D)^-1 v is p. One column
(r = 1) is a random linear combination of the rows.

With a = r/2, v = (ε - a log(1-p)) / p and u = (1-p) v, δ of the removal is
Pr[Γ(a) >= u] - exp(ε) Pr[Γ(a) >= v] = E[(1 - exp(-(X - u) p / (1-p)))+], X ~ Γ(a, 1). Where the two
probabilities agree to many digits (small p) or underflow, the expectation is integrated: its
integrand is positive. The reverse direction is E[(1 - exp(-p (y - X)))+] with y = (-ε - a log(1-p))
/ p; it is never the larger one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, final

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from fedsim.contracts.guarantee import ExactMechanism
from fedsim.privacy.contract import (
    WAYS,
    Answer,
    Calibration,
    Count,
    Direction,
    ExactCurve,
    Experiment,
    KnownMechanism,
    PositiveSize,
)
from fedsim.privacy.numerics.special import (
    Array,
    legendre,
    log_gamma_term,
    log_gammainc,
    log_gammaincc,
    require_delta,
    require_epsilon,
    require_range,
    solve,
)
from fedsim.types import FedsimError

ProjectionVariant = Literal["tight", "paper"]


_UP = 1 + 1e-12
"""Factor on σ: rounding must not lift an ε that is stated above the one asked for."""


def bound(sigma: float, row_norm: float, leverage: float) -> float:
    """Computes the largest leverage that a row v of the data D has once rows σ I are appended.

    The leverage in D is v'(D'D)^-1 v. That with σ is at most 1 / (1/p + σ²/l²), which rows along v
    attain. `row_norm` is l > 0, the bound on the L2 norm of v. `leverage` is p in (0, 1], the
    bound on the leverage in D: 1 without knowledge of D. Nothing is checked.
    """
    return 1 / (1 / leverage + (sigma / row_norm) ** 2)


def lowering(allowed: float, row_norm: float, leverage: float) -> float:
    """Computes the least σ for which `bound` of `row_norm` and `leverage` is at most `allowed`.

    It is 0 if `leverage` is no more than that; a FedsimError says that no σ is enough.
    """
    if allowed >= leverage:
        return 0.0
    if allowed <= 0:
        raise FedsimError("no noise is enough for this ε and δ; raise one of them")
    return row_norm * math.sqrt(1 / allowed - 1 / leverage) * _UP


def regularize_leverage(leverage: float, sabotage: float) -> float:
    """Computes |v|² / (|v|² + (`sabotage` σ)²), given `leverage` = |v|² / (|v|² + σ²), in [0, 1].

    >>> regularize_leverage(0.5, 1.0), regularize_leverage(0.5, 0.5)
    (0.5, 0.8)
    """
    return leverage / (leverage + sabotage**2 * (1 - leverage))


def log_delta(
    leverage: ArrayLike, r: ArrayLike, epsilon: ArrayLike, direction: Direction = "both"
) -> Array:
    """Computes ln δ of a Gaussian random projection D'G, right where δ underflows.

    The first three arguments broadcast; one out of range is a FedsimError.

    Args:
        leverage: v'(D'D)^-1 v of the row v in [0, 1]; below 1e-300 it counts as 1e-300, but for 0.
        r: number of columns, at least 1.
        epsilon: at least 0.
        direction: `forward` is the row's removal, `reverse` its addition; `both` is the larger,
            which is `forward`.

    >>> float(np.exp(log_delta(0.1, 20, 1.0)).round(8))
    0.00190344
    >>> float(np.exp(log_delta(0.1, 20, 1.0, "reverse")).round(16))
    1.678e-12
    """
    p = require_range("leverage", leverage, 0.0, 1.0, "a leverage in [0, 1]")
    columns = require_range("r", r, 1.0, np.finfo(float).max, "a number of columns, at least 1")
    p, a, eps = np.broadcast_arrays(p, columns / 2, require_epsilon(epsilon))
    result = np.where(p == 1, 0.0, -np.inf)
    inside = (p > 0) & (p < 1)
    curve = _reverse if direction == "reverse" else _forward
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        result[inside] = curve(np.maximum(p[inside], _LEAST), a[inside], eps[inside])
    return result[()]


def max_leverage(epsilon: ArrayLike, delta: ArrayLike, r: ArrayLike) -> Array:
    """Computes the largest leverage of a row at which D'G with `r` columns is (ε, δ)-private.

    The arguments broadcast: ε >= 0, δ in (0, 1) and r >= 1; others are a FedsimError.

    >>> float(max_leverage(1.0, 1e-5, 20).round(6))
    0.058119
    """
    eps, target, columns = np.broadcast_arrays(
        require_epsilon(epsilon),
        np.log(require_delta(delta)),
        require_range("r", r, 1.0, np.finfo(float).max, "a number of columns, at least 1"),
    )

    def rising(odds: Array) -> tuple[Array, Array]:
        p, a = 1 / (1 + np.exp(-odds)), columns / 2
        value = log_delta(p, columns, eps)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
            # dδ/dp = x f((1 - p) x), f the density of a chi-square with r degrees of freedom.
            slope = p * np.exp(log_gamma_term(a, _excess(p, a, eps)[0]) - value)
        # Far out, where that is the difference of huge logarithms, log δ is -ε / p.
        return value - target, np.where(value < -1e8, -value, slope)

    # Log odds from a leverage of 1e-300 up to 1 within rounding.
    odds = solve(rising, np.full(eps.shape, -690.0), np.full(eps.shape, 37.0))
    return (1 / (1 + np.exp(-odds)))[()]


def epsilon(leverage: ArrayLike, r: ArrayLike, delta: ArrayLike) -> Array:
    """Computes the least ε >= 0 at which a projection D'G onto `r` columns is (ε, δ)-private.

    It is inf for leverage 1. The arguments broadcast: leverage in [0, 1], r >= 1 and δ in (0, 1);
    others are a FedsimError.
    """
    p = require_range("leverage", leverage, 0.0, 1.0, "a leverage in [0, 1]")
    columns = require_range("r", r, 1.0, np.finfo(float).max, "a number of columns, at least 1")
    p, columns, target = np.broadcast_arrays(p, columns, np.log(require_delta(delta)))
    inner = np.clip(p, 1e-300, 1 - 2**-53)

    def falling(eps: Array) -> tuple[Array, Array]:
        a = columns / 2
        value = log_delta(inner, columns, eps)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
            upper = (eps - a * np.log1p(-inner)) / inner
            # dδ/dε = -exp(ε) Pr[Γ(a) >= v], the removal's second term:
            # the derivatives of both limits cancel.
            return target - value, np.exp(eps + log_gammaincc(a, upper) - value)

    # δ <= Pr[Γ(a) >= u] <= exp(a + sqrt(2 a t) - u) bounds u, and so ε, for t = -log δ.
    most = inner / (1 - inner) * (columns / 2 + np.sqrt(-columns * target) - target + 1)
    found = solve(falling, np.zeros(p.shape), most)
    found = np.where(log_delta(inner, columns, 0.0) <= target, 0.0, found)
    return np.where(p == 1, np.inf, np.where(p == 0, 0.0, found))[()]


def sigma(
    row_norm: ArrayLike,
    r: ArrayLike,
    epsilon: ArrayLike,
    delta: ArrayLike,
    variant: ProjectionVariant = "tight",
) -> Array:
    """Computes σ that makes the noisy projection D'G + σ N (ε, δ)-private.

    The arguments broadcast; one out of range is a FedsimError.

    Args:
        row_norm: l, the largest L2 norm of a row of D; σ is in its units.
        r: number of columns, at least 1.
        epsilon: at least 0.
        delta: in (0, 1).
        variant: `tight` takes σ = l sqrt(1/s̄ - 1), s̄ being `max_leverage`; `paper` (Figure 3)
            bounds the leverage by l² / σ².

    >>> float(sigma(1.0, 20, 1.0, 1e-5).round(4))
    4.0257
    >>> float(sigma(1.0, 20, 1.0, 1e-5, "paper").round(4))
    4.148
    """
    # The noise acts as σ I appended to D, so a row v of D has leverage v'(D'D + σ² I)^-1 v. Since D
    # holds the row itself, that is at most l² / (l² + σ²), which is attained.
    norm = require_range("row_norm", row_norm, 0.0, np.finfo(float).max, "a norm of at least 0")
    allowed = max_leverage(epsilon, delta, r)
    odds = 1 / allowed - 1 if variant == "tight" else 1 / allowed
    return norm * np.sqrt(odds)


def _excess(p: Array, a: Array, eps: Array) -> tuple[Array, Array]:
    """Computes (u / a - 1, v / a - 1), without cancellation for small p."""
    scaled = eps / a
    k = np.arange(1, 16)
    series = (np.minimum(p, 0.1)[..., None] ** k / (k + 1)).sum(-1)
    # -log(1 - p) / p - 1 as Σ p^k / (k + 1): fifteen terms are exact below p = 0.1.
    beyond = np.where(p < 0.1, series, -np.log1p(-p) / p - 1)
    return (1 - p) * (scaled / p + beyond) - p, scaled / p + beyond


def _forward(p: Array, a: Array, eps: Array) -> Array:
    v = (eps - a * np.log1p(-p)) / p
    u = (1 - p) * v
    first = log_gammaincc(a, u)
    ratio = np.exp(eps + log_gammaincc(a, v) - first)
    # Negated, so that a NaN, of two terms that underflow, is integrated as well.
    rest = ~(ratio < _APART)
    result = first + np.log1p(-np.where(rest, 0.0, ratio))
    if rest.any():
        result[rest] = _upper_integral(p[rest], a[rest], eps[rest], u[rest])
    return np.where(np.isinf(v), -np.inf, result)


def _reverse(p: Array, a: Array, eps: Array) -> Array:
    gap = -eps - a * np.log1p(-p)
    y = np.maximum(gap, 0.0) / p
    first = log_gammainc(a, y)
    ratio = np.exp(eps + log_gammainc(a, (1 - p) * y) - first)
    rest = ~(ratio < _APART) & (gap > 0)
    result = np.where(gap > 0, first + np.log1p(-np.where(rest, 0.0, ratio)), -np.inf)
    if rest.any():
        result[rest] = _lower_integral(p[rest], a[rest], y[rest])
    return result


_LEAST = 1e-300
_APART = 0.7
"""Two terms whose ratio is below this lose nothing in their difference."""
_DEPTH = 45.0
"""-log of the share of an integrand's peak below which it is left out."""


def _upper_integral(p: Array, a: Array, eps: Array, u: Array) -> Array:
    """Computes log ∫ f(u + t) (1 - exp(-t p / (1-p))) dt over t > 0, f the density of Γ(a)."""
    # f falls from u by the depth at the root of a function that is convex for a > 1.
    linear, square = 1 - (a - 1) / u, np.maximum(a - 1, 0.0) / (2 * u**2)
    end = 2 * _DEPTH / (linear + np.sqrt(linear**2 + 4 * _DEPTH * square))
    for _ in range(6):
        missing = _DEPTH - end + (a - 1) * np.log1p(end / u)
        end = np.maximum(end + missing / (1 - (a - 1) / (u + end)), end / 4)
    end = np.where(a <= 1, _DEPTH, end)
    # In z, u + t = u z², the integrand is smooth also for the odd r of a chi distribution.
    beyond = end / u / (1 + np.sqrt(1 + end / u))
    # The integrand is positive throughout: small terms of it are summed, and none cancels.
    nodes, weights = legendre(40)
    z = beyond[:, None] * nodes
    t = u[:, None] * z * (z + 2)
    fallen = np.exp((2 * a - 1)[:, None] * np.log1p(z) - t)
    total = (fallen * -np.expm1(-(p / (1 - p))[:, None] * t)) @ weights
    return np.asarray(log_gamma_term(a, _excess(p, a, eps)[0]) + np.log(2 * beyond * total))


def _lower_integral(p: Array, a: Array, y: Array) -> Array:
    """Computes log ∫ f(x) (1 - exp(-p (y - x))) dx over x < y, f the density of Γ(a)."""
    # In z, x = y z².
    linear, square = a - 0.5 - y, (a - 0.5) / 2
    depth = linear + np.sqrt(np.maximum(linear**2 + 4 * _DEPTH * square, 0.0))
    start = np.sqrt(1 - np.minimum(2 * _DEPTH / np.maximum(depth, 1e-300), 1.0))
    nodes, weights = legendre(40)
    z = 1 - (1 - start)[:, None] * (1 - nodes)
    left = y[:, None] * (1 - z) * (1 + z)
    fallen = np.exp((2 * a - 1)[:, None] * np.log(z) + left)
    total = (fallen * -np.expm1(-p[:, None] * left)) @ weights
    return np.asarray(log_gamma_term(a, y / a - 1) + np.log(2 * (1 - start) * total))


_METHOD = "closed form (Lu et al., Theorem 2)"


class _RandomProjectionCurve(ExactCurve):
    formula: ClassVar[str] = _METHOD
    leverage: float = Field(ge=0, le=1)
    """Leverage of the row that the neighbour lacks (with noise: in D with σ I appended)."""
    r: Count
    """Columns of G, the projection's dimension; 1 is a random linear combination of the rows."""

    def neighbours(self) -> str:
        return f"add or remove, leverage ≤ {self.leverage:g}"

    def delta(self, epsilon: float) -> Answer:
        # The larger direction is known to be `forward`; the other takes as long.
        return self._answer(epsilon, float(log_delta(self.leverage, self.r, epsilon)), "forward")

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        return {way: log_delta(self.leverage, self.r, epsilons, way) for way in WAYS}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        return {"forward": float(epsilon(self.leverage, self.r, delta))}


class _RandomProjectionCalibration(Calibration):
    """The least noise of Gaussian random projection: σ of D'G + N."""

    row_norm: PositiveSize
    """The largest L2 norm of a row, in the units of the data."""
    r: Count
    """Columns of G, the projection's dimension; 1 is a random linear combination of the rows."""
    variant: ProjectionVariant = "tight"
    """`tight`: l sqrt(1/s - 1) at the largest leverage s allowed; `paper`: l sqrt(1/s)."""

    def neighbours(self) -> str:
        return f"add or remove, norm ≤ {self.row_norm:g}"

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        found = float(sigma(self.row_norm, self.r, epsilon, delta, self.variant))
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=float(np.log(delta)),
            method=f"{_METHOD}, {self.variant} noise",
            direction="forward",
            sigma=found,
            noise_multiplier=found / self.row_norm,
            max_leverage=float(max_leverage(epsilon, delta, self.r)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class ProjectionRelease(ExactMechanism):
    """Releases Gaussian random projections D'G; no row of D has more than `leverage`.

    That is the leverage in (0, 1] once noise, as rows σ I, is appended to D. G has `columns`
    columns; several releases are one projection onto all their columns.
    """

    leverage: float
    columns: int
    without_noise: float = 1.0
    """The largest leverage of a row in D itself, without noise."""
    accountant: str = "exact random projection"

    def epsilon(self, delta: float, releases: int) -> float:
        """Computes ε at δ in (0, 1) of `releases` projections of the data; inf for leverage 1."""
        return float(epsilon(self.leverage, self.columns * releases, delta))

    def with_share(self, share: float) -> ProjectionRelease:
        """Returns the release with the noise's variance multiplied by `share`, in [0, 1]."""
        # 1 / leverage grows in proportion to the noise's variance.
        bare = 1 / self.without_noise
        leverage = 1 / (bare + share * (1 / self.leverage - bare))
        return replace(self, leverage=leverage)


class _RandomProjectionExperiment(Experiment):
    """r random combinations of a regularized database's rows, seen along the row v that is doubted.

    Of A' G the r columns are N(0, A'A); along M⁻¹v, M = A'A with the row, they have variance p with
    it and p (1 - p) without. `sabotage` scales the regularization, as where the row stands alone
    against it.
    """

    claims = _RandomProjectionCurve
    leverage: Annotated[float, Field(ge=0, lt=1)]
    """p = v' M⁻¹ v: leverage of the row in the regularized database that holds it."""
    r: Count
    """Number of random combinations released."""

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        p = regularize_leverage(self.leverage, self.sabotage)
        variance = p if present else p * (1 - p)
        squares = variance * rng.chisquare(self.r, draws)
        return squares / (2 * (1 - p)) + self.r / 2 * math.log1p(-p)


class KnownRandomProjection(KnownMechanism):
    """Projects a matrix D on random Gaussian columns: releases D'G, alone or with noise."""

    curve = _RandomProjectionCurve
    calibration = _RandomProjectionCalibration
    experiment = _RandomProjectionExperiment
