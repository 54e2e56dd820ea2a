"""The calculator's Gaussian sampling: what is known of neighbours, and the keys that say it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, final

import numpy as np
from pydantic import Field, model_validator

from fedsim.contracts.guarantee import CurveMechanism
from fedsim.privacy.contract import (
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
from fedsim.privacy.mechanisms import kernel_distance, wishart
from fedsim.privacy.numerics.special import Array
from fedsim.types import FedsimError

_SamplingVariant = Literal["exact", "paper"]


class _Neighbours(Keys):
    """Keys that bound the difference of neighbours' K and K': `distance`, or `beta` and `lift`."""

    distance: PositiveSize | None = None
    """Frobenius norm of K^(1/2) K'^-1 K^(1/2) - I, the largest over neighbours."""
    beta: PositiveSize | None = None
    """Largest L2 distance that one row moves; in place of distance, for quadratic kernels."""
    lift: PositiveSize | None = None
    """γ of the γ I that is added to the kernel matrix; with beta."""
    gain: PositiveSize = 1.0
    """The largest eigenvalue of S in the kernel (x'z)(x'Sz); with beta."""
    row_norm: PositiveSize = 1.0
    """The bound on a row's L2 norm; with beta."""

    def neighbours(self) -> str:
        if self.beta is None:
            return f"close, kernels at a distance ≤ {self.distance:g}"
        return f"close, a row moved by ≤ {self.beta:g}"

    @model_validator(mode="after")
    def _one_of_both(self) -> _Neighbours:
        if (self.beta is None) != (self.lift is None) or (self.distance is None) == (
            self.beta is None
        ):
            raise ValueError("gaussian_sampling takes distance, or else both beta and lift")
        return self

    def separation(self) -> float | Array:
        if self.beta is None or self.lift is None:
            return self.apart()
        return kernel_distance.eigenvalues_under_lift(
            self.beta, self.lift, gain=self.gain, row_norm=self.row_norm
        )

    def apart(self) -> float:
        """Returns M, the largest distance |K^½ K'⁻¹ K^½ - I|_F of neighbours' kernel matrices."""
        if self.distance is not None:
            return self.distance
        assert self.beta is not None and self.lift is not None
        return kernel_distance.lift_distance(
            self.beta, self.lift, gain=self.gain, row_norm=self.row_norm
        )

    @property
    def method(self) -> str:
        worst = "worst eigenvalues" + (" at this distance" if self.beta is None else ", proven")
        return f"contour integral, {worst}"


class _GaussianSamplingCurve(_Neighbours, ExactCurve):
    k: Count
    """Number of draws."""
    variant: _SamplingVariant = "exact"
    """`paper`: the condition of DP-NTK regression's Lemma 5.4, for ε below 1; for ε only."""

    def details(self) -> dict[str, str]:
        paper = "DP-NTK regression, Lemma 5.4 (for ε < 1)"
        return {"method": paper if self.variant == "paper" else self.method}

    def delta(self, epsilon: float) -> Answer:
        if self.variant == "paper":
            raise FedsimError("variant: paper states ε only; ask for epsilon, or use variant=exact")
        return super().delta(epsilon)

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        return {"both": wishart.log_delta_at(self.k, self.separation(), epsilons)}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        if self.variant == "paper":
            return {"both": wishart.paper_epsilon(self.k, self.apart(), delta)}
        return {"both": wishart.epsilon(self.k, self.separation(), delta)}


class _GaussianSamplingCalibration(_Neighbours, Calibration):
    def calibrate(self, epsilon: float, delta: float) -> Answer:
        draws = wishart.max_draws(self.separation(), epsilon, delta)
        if draws == 0:
            raise FedsimError(
                f"distance: not even one draw is ({epsilon:g}, {delta:g})-private at "
                f"{self.apart():g}; allow a larger epsilon or bring neighbours closer"
            )
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=math.log(delta),
            method=self.method,
            direction="both",
            draws=draws,
        )


@final
@dataclass(frozen=True, kw_only=True)
class SamplingRelease(CurveMechanism):
    """Releases draws of N(0, K), whose δ `wishart.log_delta_of` computes: see the base class."""

    samples: int
    """Number of draws, from 0."""
    eigenvalues: tuple[tuple[float, float], ...]
    """Rows (λ+, λ-) of `wishart.log_delta_of`, at least 0, as `kernel_distance` computes them."""
    accountant: str = "exact Gaussian sampling"

    def log_delta(self, epsilons: Array) -> Array:
        """Computes ln δ at each of `epsilons` >= 0, in their shape; -inf without draws.

        A FedsimError refuses other ε, and eigenvalues below 0.
        """
        if self.samples == 0:
            return np.full_like(epsilons, -np.inf)
        return wishart.log_delta_of(self.samples, np.array(self.eigenvalues), epsilons)


class _GaussianSamplingExperiment(_Neighbours, Experiment):
    """k draws of N(0, K) against k of N(0, K'), in the directions in which the two differ.

    Of beta and lift these are the two of the worst neighbours. Of a distance M it is one, in which
    K' has 1 / (1 - M) times K's variance: the worst pair, but for ε so small that more directions
    are. `sabotage` acts on k, whose square root is what more draws take from the noise of their
    mean: 0.8 is k / 0.64 draws.
    """

    claims = _GaussianSamplingCurve
    k: Count
    """Number of draws."""
    distance: Annotated[float | None, Field(ge=1e-12, lt=1)] = None
    """M: Frobenius norm of K^½ K'⁻¹ K^½ - I, the largest over neighbours."""

    @model_validator(mode="after")
    def _some_draws(self) -> _GaussianSamplingExperiment:
        if self._drawn < 1:
            raise ValueError(
                f"sabotage: {self.sabotage:g} leaves no draw of k = {self.k}; use at most "
                f"{math.floor(100 * math.sqrt(self.k)) / 100:g}, or a larger k"
            )
        return self

    @property
    def _drawn(self) -> int:
        return round(self.k / self.sabotage**2)

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        count, apart = self._drawn, self.separation()
        up, down = apart[0] if isinstance(apart, np.ndarray) else (0.0, apart)
        ratio = np.zeros(draws)
        # In a direction with ratio 1 - a, the log ratio is
        # (a S + k log(1 - a)) / 2, S being a sum of k squares.
        for a in filter(None, (-up, down)):
            squares = rng.chisquare(count, draws) / (1 - a if present else 1.0)
            ratio += a * squares / 2 + count / 2 * math.log1p(-a)
        return ratio


class KnownGaussianSampling(KnownMechanism):
    """Samples a positive semidefinite matrix K: the mean of k squares g g', with g ~ N(0, K)."""

    curve = _GaussianSamplingCurve
    calibration = _GaussianSamplingCalibration
    experiment = _GaussianSamplingExperiment
