"""The exact privacy curve of sketched least squares: a normal approximation of the solution.

Source: Lu, Magdon-Ismail, Wei and Zikas, The Normal Distributions Indistinguishability Spectrum and
its Application to Privacy-Preserving Machine Learning, Theorem 4 (Lemma 1 for the distribution):
the release is N(x, |e|² (B'B)^-1 / r), x and e being the solution and the residual of min |B x - b|
and r the number of rows of the sketch that it stands for. The neighbour lacks one row of [B, b],
which has leverage p in B and q in [B, b]; q - p = e_i² / |e|².

The log-likelihood ratio is a quadratic form (`quadratic`). q = p makes it that of a random linear
combination, p = 0 that of a projection onto d columns with the directions exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal, Self, final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from fedsim.contracts.guarantee import ExactMechanism
from fedsim.privacy.contract import (
    WAYS,
    Answer,
    Calibration,
    Count,
    Direction,
    ExactCurve,
    Experiment,
    Keys,
    KnownMechanism,
    PositiveSize,
)
from fedsim.privacy.mechanisms.projection import lowering, regularize_leverage
from fedsim.privacy.numerics import quadratic
from fedsim.privacy.numerics.special import (
    Array,
    least_epsilon,
    require_delta,
    require_epsilon,
    require_range,
)
from fedsim.types import FedsimError

NoiseVariant = Literal["tight", "paper"]
_MANY = np.finfo(float).max
_ROUNDS = 18
"""Refinements of a search: each halves the reach around its best points."""
_LOWEST = -115.0
"""Logarithm of the smallest leverage that is looked for."""


def log_delta(
    p: ArrayLike,
    q: ArrayLike,
    r: ArrayLike,
    d: ArrayLike,
    epsilon: ArrayLike,
    direction: Direction = "both",
) -> Array:
    """Computes ln δ of sketched least squares for a row of given leverages, also at underflow.

    The release is N(x, |e|² (B'B)^-1 / r), x and e being solution and residual of min |B x - b|.
    The arguments broadcast; those out of range are a FedsimError.

    Args:
        p: leverage of the row in B (the features), in [0, 1].
        q: leverage of the row in [B, b] (with the target), in [p, 1].
        r: rows of the sketch that the release stands for, at least 1.
        d: features, at least 1.
        epsilon: at least 0.
        direction: `forward` is the row's removal, `reverse` its addition; `both` is the larger.

    >>> float(np.exp(log_delta(0.02, 0.05, 300, 12, 1.0)).round(6))
    0.003475
    """
    # q = 1: without the row the residual vanishes
    return _largest(quadratic.log_delta, p, q, r, d, require_epsilon(epsilon), direction, 0.0)


def _largest(
    function: Callable[..., Array],
    p: ArrayLike,
    q: ArrayLike,
    r: ArrayLike,
    d: ArrayLike,
    argument: Array,
    direction: Direction,
    at_one: float,
) -> Array:
    """Returns the largest of `function` over the directions; `at_one` is its value for q = 1."""
    p, q, r, d, at = np.broadcast_arrays(*_require_keys(p, q, r, d), argument)
    result = np.full(p.shape, at_one)
    inside = q < 1
    p, q, r, d, at = (x[inside] for x in (p, q, r, d, at))
    ways = WAYS if direction == "both" else (direction,)
    result[inside] = np.max([function(*_form(p, q, r, d, way), at) for way in ways], axis=0)
    return result[()]


@dataclass(frozen=True, kw_only=True)
class _WorstRow:
    """The most revealing row among those whose leverage in [B, b] is at most a bound.

    `p` is its leverage in B, `q` that in [B, b], and `log_delta` that of the worse `direction`.
    """

    p: float
    q: float
    log_delta: float
    direction: Direction


def _worst(
    max_leverage: float,
    r: float,
    d: float,
    epsilon: float,
    max_residual: float = 1.0,
    rounds: int = _ROUNDS,
) -> _WorstRow:
    """Finds the row of q <= `max_leverage` and q - p <= `max_residual` with the largest δ."""
    # Neither p nor q alone moves δ in one direction (Theorem 5 assumes that they do). So the whole
    # set is searched: on a grid, and then, `rounds` times, around its best points.

    def leverages(points: Array) -> tuple[Array, Array]:
        q = max_leverage * points[1]
        # The least p that the bound on q - p allows is where the first coordinate is 0.
        least = np.maximum(q - max_residual, 0.0)
        return least + points[0] * (q - least), q

    def value(points: Array, reverse: NDArray[np.bool_]) -> Array:
        p, q = leverages(points)
        found = np.empty(reverse.shape)
        for way, rows in zip(WAYS, (~reverse, reverse), strict=True):
            found[rows] = log_delta(p[rows], q[rows], r, d, epsilon, way)
        return found

    # p between its ends and q / max_leverage, for either direction
    grid = np.stack(np.meshgrid(np.linspace(0, 1, 33), np.linspace(0, 1, 17)[1:])).reshape(2, -1)
    points = np.concatenate([grid, grid], axis=1)
    reverse = np.arange(points.shape[1]) >= grid.shape[1]
    values = value(points, reverse)
    # The two best points of each direction, lest the grid's best lie beside the lower of two peaks.
    tops = [*np.argsort(values[~reverse])[-2:], *grid.shape[1] + np.argsort(values[reverse])[-2:]]
    best, reverse, values = points[:, tops], reverse[tops], values[tops, None]
    around = np.stack(np.meshgrid(*[np.linspace(-1, 1, 5)] * 2)).reshape(2, 1, -1)
    reach = np.array([1 / 32, 1 / 16])[:, None, None]
    for _ in range(rounds):
        tried = np.clip(best[:, :, None] + reach * around, 0.0, 1.0)
        values = value(tried, np.broadcast_to(reverse[:, None], tried.shape[1:]))
        best = tried[:, np.arange(len(tops)), values.argmax(-1)]
        reach = reach / 2
    top = int(values.max(-1).argmax())
    p, q = leverages(best[:, top])
    return _WorstRow(
        p=float(p),
        q=float(q),
        log_delta=float(values[top].max()),
        direction="reverse" if reverse[top] else "forward",
    )


def is_private(
    leverage: float, residual: float, r: float, d: float, epsilon: float, delta: float
) -> bool:
    """Returns whether the release of `log_delta` is (ε, δ)-private for every row within bounds.

    A FedsimError refuses r or d below 1, and ε below 0.

    Args:
        leverage: largest leverage q of a row in [B, b], features and target, in (0, 1].
        residual: largest share q - p of a row in the squared residuals, in (0, 1].
        r: rows of the sketch that the release stands for.
        d: features.
        epsilon: at least 0.
        delta: in (0, 1).
    """
    return _worst(leverage, r, d, epsilon, residual).log_delta <= math.log(delta)


def max_leverage(epsilon: float, delta: float, r: float, d: float) -> float:
    """Finds the largest leverage q up to which every row's δ is at most `delta`.

    The release is that of `log_delta`, and q the leverage in [B, b], features and target. A
    FedsimError says that an argument is out of range, or that the leverage is below 1e-50.

    Args:
        epsilon: at least 0.
        delta: in (0, 1).
        r: rows of the sketch that the release stands for.
        d: features.
    """

    def log_worst(odds: float, rounds: int = _ROUNDS) -> float:
        bound = float(1 / (1 + np.exp(-odds)))
        return _worst(bound, r, d, epsilon, rounds=rounds).log_delta

    # The grid alone finds where to look: it is hardly below the maximum.
    rough = _crossing(lambda odds: log_worst(odds, 0), _LOWEST, 36.0, delta, tolerance=1e-2)
    low, high = rough - 0.1, min(rough + 0.02, 36.0)
    # The grid alone may be off by more than the margin: then the whole range is searched.
    if not log_worst(low) <= np.log(delta) <= log_worst(high):
        low, high = _LOWEST, 36.0
    return float(1 / (1 + np.exp(-_crossing(log_worst, low, high, delta))))


def sigma(
    row_norm: float,
    r: float,
    d: float,
    epsilon: float,
    delta: float,
    variant: NoiseVariant = "tight",
) -> float:
    """Finds σ of the rows σ I appended to [B, b] that makes `log_delta`'s release (ε, δ)-private.

    A FedsimError says that an argument is out of range, or needs a leverage below 1e-50.

    Args:
        row_norm: l, the largest L2 norm of a row of [B, b], features and target; σ is in its units.
        r: rows of the sketch that the release stands for.
        d: features.
        epsilon: at least 0.
        delta: in (0, 1).
        variant: `tight` bounds δ over all leverages 0 <= p <= q <= l² / (l² + σ²), which a database
            of that one row attains; `paper` (Figure 4) takes p = l² / σ² and q = 2 l² / σ², which
            no row can have.
    """
    norm = float(require_range("row_norm", row_norm, 0.0, _MANY, "a norm of at least 0"))
    if variant == "tight":
        return float(norm * np.sqrt(1 / max_leverage(epsilon, delta, r, d) - 1))

    def log_corner(log_p: float) -> float:
        p = float(np.exp(log_p))
        return float(log_delta(p, 2 * p, r, d, epsilon))

    corner = float(np.exp(_crossing(log_corner, _LOWEST, float(np.log(0.5)), delta)))
    return float(norm * np.sqrt(1 / corner))


def _crossing(
    log_delta: Callable[[float], float],
    low: float,
    high: float,
    delta: float,
    tolerance: float = 1e-13,
) -> float:
    """Finds where log δ, rising with a leverage's logarithm (or log odds), meets `delta`."""
    from scipy.optimize import brentq

    target = float(np.log(require_delta(delta)))

    def missing(at: float) -> float:
        # log δ is as steep as -1 / leverage far out, which arcsinh makes a straight line
        return float(np.arcsinh(max(log_delta(at), -1e300) - target))

    if missing(low) > 0:
        raise FedsimError(
            f"delta: {delta:g} needs a leverage below 1e-50 at this epsilon; ask for a larger "
            "delta or epsilon"
        )
    return float(brentq(missing, low, high, xtol=tolerance, rtol=1e-14))


def _require_keys(p: ArrayLike, q: ArrayLike, r: ArrayLike, d: ArrayLike) -> tuple[Array, ...]:
    """Checks the keys of `log_delta`, and returns (p, q, r, d) broadcast together."""
    p, q, r, d = np.broadcast_arrays(
        require_range("p", p, 0.0, 1.0, "a leverage in [0, 1]"),
        require_range("q", q, 0.0, 1.0, "a leverage in [0, 1]"),
        require_range("r", r, 1.0, _MANY, "the rows of the sketch, at least 1"),
        require_range("d", d, 1.0, _MANY, "the number of features, at least 1"),
    )
    if (p > q).any():
        raise FedsimError(
            f"p: got {p[p > q].flat[0]:g}, more than q = {q[p > q].flat[0]:g}; a row's leverage in "
            "[B, b] is at least that in B"
        )
    return p, q, r, d


def _form(
    p: Array, q: Array, r: Array, d: Array, direction: Direction
) -> tuple[Array, Array, Array, Array]:
    """Writes Theorem 4 as (a, rest, shift, count) of `quadratic`, for q < 1."""
    # 1 - a is given beside a, since the difference would lose its digits for a close to 1.
    s, kept = q - p, 1 - p
    if direction == "forward":
        first, second = kept**2 / (1 - q), kept / (1 - q)
        a = np.stack([(p * kept - s) / (1 - q), -s / (1 - q)], axis=-1)
        shift = r * s * p * (kept / (1 - q)) ** 2
    else:
        first, second = (1 - q) / kept**2, (1 - q) / kept
        a = np.stack([(s - p * kept) / kept**2, s / kept], axis=-1)
        shift = r * s * p * (1 - q) / kept**4
    return (
        a,
        np.stack([first, second], axis=-1),
        np.stack([shift, np.zeros_like(shift)], axis=-1),
        np.stack([np.ones_like(d), d - 1], axis=-1),
    )


_METHOD = "contour integral (Lu et al., Theorem 4)"


class _Leverages(Keys):
    p: float = Field(ge=0, le=1)
    """Leverage of the row in B, the features."""
    q: float = Field(ge=0, le=1)
    """Leverage of the row in [B, b], the features and the target; at least p."""
    r: Count
    """Rows of the sketch that the release stands for."""
    d: Count
    """Features: columns of B."""

    def neighbours(self) -> str:
        return f"add or remove, leverages {self.p:g} and {self.q:g}"

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        _require_keys(self.p, self.q, self.r, self.d)
        return self


class _LeastSquaresCurve(_Leverages, ExactCurve):
    formula: ClassVar[str] = _METHOD

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        keys = (self.p, self.q, self.r, self.d, epsilons)
        return {way: log_delta(*keys, way) for way in WAYS}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        keys = (self.p, self.q, self.r, self.d, require_delta(delta))
        return {
            way: float(_largest(quadratic.epsilon, *keys, way, at_one=math.inf)) for way in WAYS
        }


class _LeastSquaresCalibration(Calibration):
    """The least noise of sketched least squares: σ of the rows σ I appended to [B, b]."""

    row_norm: PositiveSize
    """The largest L2 norm of a row of [B, b], in the units of the data."""
    r: Count
    """Rows of the sketch that the release stands for."""
    d: Count
    """Features: columns of B."""
    variant: NoiseVariant = "tight"
    """`tight`: the maximum over all leverages a row can have; `paper`: p = l²/σ², q = 2 l²/σ²."""
    leverage: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest leverage in [B, b] of a row, in any database to hide among. Below 1 the claim is
    relative to these databases, and no differential privacy."""
    residual: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest share of a row in the squared residuals, likewise. It counts where no noise is
    needed, since rows σ I may enlarge it."""

    def neighbours(self) -> str:
        among = ""
        if min(self.leverage, self.residual) < 1:
            among = (
                f", leverage ≤ {self.leverage:g}, residual ≤ {self.residual:g} (relative, no DP)"
            )
        return f"add or remove, norm ≤ {self.row_norm:g}{among}"

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        allowed: float | None = None
        way: Direction | None = None
        if min(self.leverage, self.residual) < 1:
            if self.variant == "paper":
                raise FedsimError("variant: paper knows no leverage or residual; use variant=tight")
            how, found, allowed = (
                "relative to the declared leverage and residual",
                0.0,
                self.leverage,
            )
            known = (self.leverage, self.residual, self.r, self.d)
            if not is_private(*known, epsilon, delta):
                allowed = max_leverage(epsilon, delta, self.r, self.d)
                found = lowering(allowed, self.row_norm, self.leverage)
        else:
            how = f"{self.variant} noise"
            found = sigma(self.row_norm, self.r, self.d, epsilon, delta, self.variant)
            # `paper` noise assumes leverages that no row has: there is no largest one to state.
            if self.variant == "tight":
                allowed = self.row_norm**2 / (self.row_norm**2 + found**2)
                way = _worst(allowed, self.r, self.d, epsilon).direction
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=float(np.log(delta)),
            method=f"{_METHOD}, {how}",
            direction=way,
            sigma=found,
            noise_multiplier=found / self.row_norm,
            max_leverage=allowed,
        )


@final
@dataclass(frozen=True, kw_only=True)
class RegressionRelease(ExactMechanism):
    """Releases sketched least squares (`log_delta`); no row has more than `leverage` in [B, b].

    `columns` is r, the number of rows of the sketch that the release stands for, and `features` is
    d, the number of columns of B.
    """

    leverage: float
    columns: int
    features: int
    residual: float = 1.0
    """The largest share of a row in the squared residuals."""
    accountant: str = "exact least squares, worst row"

    def epsilon(self, delta: float, releases: int) -> float:
        """Computes ε of `releases` >= 1, worst row: `releases` times one's at δ / `releases`.

        It is inf for a `leverage` of 1.
        """
        keys = (self.leverage, self.residual, self.columns, self.features)
        return releases * _worst_epsilon(*keys, delta / releases)


@cache
def _worst_epsilon(leverage: float, residual: float, r: int, d: int, delta: float) -> float:
    if leverage >= 1:
        return math.inf
    found = least_epsilon(
        lambda at: _worst(leverage, r, d, at, residual).log_delta,
        math.log(delta),
        xtol=1e-9,
        rtol=1e-12,
        most=1e9,
    )
    # Rounded up by the tolerance: the claim must not be below the truth.
    return found + 1e-9 if found > 0 else 0.0


class _LeastSquaresExperiment(_Leverages, Experiment):
    """N(x, |e|² (B'B)⁻¹ / r) for least squares' solution x and residuals e, seen along one row.

    M is B'B with the row, and u the row's entries in B. In units in which the release with the row
    is N(0, I), that without it has another mean and variance along M^-½ u, and another variance in
    the other d - 1 directions. `sabotage` scales the regularization.
    """

    claims = _LeastSquaresCurve
    p: Annotated[float, Field(ge=0, lt=1)]
    """Leverage of the row in B."""
    q: Annotated[float, Field(ge=0, lt=1)]
    """Leverage of the row in [B, b]; at least p."""

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        p, q = (
            regularize_leverage(self.p, self.sabotage),
            regularize_leverage(self.q, self.sabotage),
        )
        mean = -math.sqrt(self.r * p * max(0.0, q - p)) / (1 - p)  # rounded, q may be less
        along, across = (1 - q) / (1 - p) ** 2, (1 - q) / (1 - p)
        first = rng.standard_normal(draws)
        others = rng.chisquare(self.d - 1, draws) if self.d > 1 else np.zeros(draws)
        if not present:
            first, others = mean + math.sqrt(along) * first, across * others
        ratio = ((first - mean) ** 2 / along - first**2 + others / across - others) / 2
        return ratio + (math.log(along) + (self.d - 1) * math.log(across)) / 2


class KnownLeastSquares(KnownMechanism):
    """Releases a normal vector around the solution, as least squares on a sketch would."""

    curve = _LeastSquaresCurve
    calibration = _LeastSquaresCalibration
    experiment = _LeastSquaresExperiment
