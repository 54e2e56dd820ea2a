"""The calculator's and the ledger's least squares; the curve itself is in `regression`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Self, final

import numpy as np
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
    Size,
)
from fedsim.privacy.mechanisms import regression
from fedsim.privacy.mechanisms.leverage import regularized
from fedsim.privacy.mechanisms.regression import Variant, worst
from fedsim.privacy.numerics.special import Array, least_epsilon

_METHOD = "contour integral (Lu et al., Theorem 4)"


class Leverages(Keys):
    """What δ of least squares depends on."""

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
    def _ordered(self) -> Self:
        regression.checked_keys(self.p, self.q, self.r, self.d)
        return self


class LeastSquaresCurve(Leverages, ExactCurve):
    """δ(ε) at given leverages."""

    formula: ClassVar[str] = _METHOD

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        keys = (self.p, self.q, self.r, self.d, epsilons)
        return {way: regression.log_delta(*keys, way) for way in WAYS}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        keys = (self.p, self.q, self.r, self.d, delta)
        return {way: float(regression.epsilon(*keys, way)) for way in WAYS}


class LeastSquaresCalibration(Calibration):
    """The least noise of sketched least squares: σ of the rows σ I appended to [B, b]."""

    row_norm: Size
    """The largest L2 norm of a row of [B, b], in the units of the data."""
    r: Count
    """Rows of the sketch that the release stands for."""
    d: Count
    """Features: columns of B."""
    variant: Variant = "tight"
    """`tight`: the maximum over all leverages a row can have; `paper`: p = l²/σ², q = 2 l²/σ²."""

    def neighbours(self) -> str:
        return f"add or remove, norm ≤ {self.row_norm:g}"

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        found = regression.sigma(self.row_norm, self.r, self.d, epsilon, delta, self.variant)
        allowed, way = None, None
        if self.variant == "tight":
            allowed = self.row_norm**2 / (self.row_norm**2 + found**2)
            way = worst(allowed, self.r, self.d, epsilon).direction
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=float(np.log(delta)),
            method=f"{_METHOD}, {self.variant} noise",
            direction=way,
            sigma=found,
            noise_multiplier=found / self.row_norm,
            max_leverage=allowed,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Regressed(ExactMechanism):
    """A draw of N(x, |e|² (B'B)^-1 / r) where no row has more than `leverage` in [B, b]."""

    leverage: float
    columns: int
    features: int
    accountant: str = "exact least squares, worst row"

    def epsilon(self, delta: float, releases: int) -> float:
        """The worst row's, over all leverages in B; several releases by basic composition."""
        return releases * _epsilon(self.leverage, self.columns, self.features, delta / releases)


@cache
def _epsilon(leverage: float, r: int, d: int, delta: float) -> float:
    """The least ε at which every row of at most that leverage is private."""
    if leverage >= 1:
        return math.inf
    found = least_epsilon(
        lambda at: worst(leverage, r, d, at).log_delta,
        math.log(delta),
        xtol=1e-9,
        rtol=1e-12,
        most=1e9,
    )
    # Rounded up by the tolerance: the claim must not be below the truth.
    return found + 1e-9 if found > 0 else 0.0


@final
class LeastSquaresExperiment(Leverages, Experiment):
    """N(x, |e|² (B'B)⁻¹ / r) for least squares' solution x and residuals e, seen along one row.

    In units of the release with the row, the release without it has mean m and variance v along
    M^-½ b and variance w in the other d - 1 directions. `sabotage` scales the regularization.
    """

    claims = LeastSquaresCurve
    p: Annotated[float, Field(ge=0, lt=1)]
    """Leverage of the row in B."""
    q: Annotated[float, Field(ge=0, lt=1)]
    """Leverage of the row in [B, b]; at least p."""

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        """(draws,) log likelihood ratios."""
        p, q = regularized(self.p, self.sabotage), regularized(self.q, self.sabotage)
        mean = -math.sqrt(self.r * p * max(0.0, q - p)) / (1 - p)  # rounded, q may be less
        along, across = (1 - q) / (1 - p) ** 2, (1 - q) / (1 - p)
        first = rng.standard_normal(draws)
        others = rng.chisquare(self.d - 1, draws) if self.d > 1 else np.zeros(draws)
        if not present:
            first, others = mean + math.sqrt(along) * first, across * others
        ratio = ((first - mean) ** 2 / along - first**2 + others / across - others) / 2
        return ratio + (math.log(along) + (self.d - 1) * math.log(across)) / 2


class LeastSquares(KnownMechanism):
    """Sketched least squares: a normal release around the solution."""

    curve = LeastSquaresCurve
    calibration = LeastSquaresCalibration
    experiment = LeastSquaresExperiment
