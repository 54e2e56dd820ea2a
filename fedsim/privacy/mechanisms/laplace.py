"""The exact privacy curve of truncated Laplace noise.

Source: Geng, Ding, Guo and Kumar, Tight Analysis of Privacy and Utility Tradeoff in Approximate
Differential Privacy, AISTATS 2020, as used in DP-NTK regression, Lemma 3.2: noise of density
proportional to exp(-|x| / b) on [-B, B], with b = Δ / ε and B = b log1p(expm1(ε) / (2 δ)), makes a
number of sensitivity Δ (ε, δ)-private. The claim is exact: less than that δ is impossible.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedsim.privacy.contract import (
    Answer,
    Calibration,
    Direction,
    ExactCurve,
    Experiment,
    KnownMechanism,
    PositiveSize,
    Sensitivity,
)
from fedsim.privacy.numerics.special import (
    Array,
    require_delta,
    require_epsilon,
    require_positive,
    require_range,
)
from fedsim.types import FedsimError


def bound(sensitivity: ArrayLike, epsilon: ArrayLike, delta: ArrayLike) -> Array:
    """Computes B, the least bound of truncated Laplace noise of scale sensitivity / ε.

    Its density on ± B is proportional to exp(-|x| / scale). One number with it is (ε, δ)-private,
    `sensitivity` being the largest distance of neighbours' values, in the units of B. The arguments
    broadcast. A FedsimError refuses a sensitivity or ε that is not above 0, and a δ not in (0, 1).

    >>> float(bound(1.0, 1.0, 1e-5).round(4))
    11.3611
    """
    kind = np.finfo(float)
    eps = require_range("epsilon", epsilon, kind.tiny, kind.max, "a number above 0")
    with np.errstate(over="ignore"):
        # log1p(expm1(ε) / 2δ) = ε + log(exp(-ε) + (1 - exp(-ε)) / 2δ), finite for any ε
        parts = np.log(np.exp(-eps) - np.expm1(-eps) / (2 * require_delta(delta)))
        small = np.log1p(np.expm1(np.minimum(eps, 1.0)) / (2 * require_delta(delta)))
    return (
        require_positive("sensitivity", sensitivity) / eps * np.where(eps < 1, small, eps + parts)
    )


def _log_delta(
    sensitivity: ArrayLike, scale: ArrayLike, bound: ArrayLike, epsilon: ArrayLike
) -> Array:
    """Computes log δ of one number behind noise of scale b, alike in both directions."""
    gap, b, most, eps = np.broadcast_arrays(
        require_positive("sensitivity", sensitivity),
        require_positive("scale", scale),
        require_positive("bound", bound),
        require_epsilon(epsilon),
    )
    ratio, reach = gap / b, most / b
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mass = -np.expm1(-reach)
        # Below the point where the densities' ratio is exp(ε), between 0 and the shift ...
        middle = -2 * np.expm1((eps - ratio) / 2) + np.exp(-reach) * np.expm1(eps)
        # ... or only where the shifted noise cannot fall, below the shift less B.
        edge = np.where(
            ratio <= reach,
            np.log(np.exp(-reach) * np.expm1(ratio)),
            np.log(mass - np.expm1(reach - ratio)),
        )
        # expm1 overflows for large ratios; from 30 on it is exp to double precision.
        edge = np.where(ratio <= reach, np.where(ratio > 30, ratio - reach, edge), edge)
        inner = (eps < ratio) & ((ratio - eps) / 2 > ratio - reach)
        result = np.where(inner, np.log(middle), edge) - np.log(2 * mass)
    return np.where(gap >= 2 * most, 0.0, np.minimum(result, 0.0))[()]


def _epsilon(sensitivity: float, scale: float, bound: float, delta: float) -> float:
    """Computes the least ε >= 0 at which δ is at most `delta`; inf if the bound rules it out."""
    from scipy.optimize import brentq

    target = float(np.log(require_delta(delta)))

    def excess(at: float) -> float:
        return float(_log_delta(sensitivity, scale, bound, at)) - target

    # From here on δ falls no further: it is the probability at the noise's ends.
    last = sensitivity / scale
    if excess(0.0) <= 0:
        return 0.0
    # Calibrated noise has exactly δ at its ends: rounding must not make that infinite.
    if excess(last) > 1e-12:
        return math.inf
    if excess(last) >= 0:
        return last
    return float(brentq(excess, 0.0, last, xtol=1e-300, rtol=1e-14))


def std(scale: float, bound: float) -> float:
    """Computes the standard deviation of noise of density ∝ exp(-|x| / `scale`) on ± `bound`.

    Both are above 0, in the units of the result; nothing is checked.
    """
    from scipy.special import gammainc

    # E[x²] of a truncated exponential is Γ(3) = 2 times the regularized gammainc(3), over its mass.
    reach = bound / scale
    return scale * math.sqrt(2 * float(gammainc(3.0, reach)) / -math.expm1(-reach))


class _TruncatedLaplaceCurve(Sensitivity, ExactCurve):
    formula: ClassVar[str] = "closed form (Geng et al. 2020)"
    scale: PositiveSize
    """b of the density exp(-|x| / b), in the units of the release."""
    bound: PositiveSize
    """The largest magnitude of the noise, in the units of the release."""

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        return {"both": _log_delta(self.sensitivity, self.scale, self.bound, epsilons)}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        return {"both": _epsilon(self.sensitivity, self.scale, self.bound, delta)}

    def details(self) -> dict[str, float]:
        deviation = std(self.scale, self.bound)
        return {
            "sigma": deviation,
            "noise_multiplier": deviation / self.sensitivity,
            "scale": self.scale,
            "bound": self.bound,
        }


class _TruncatedLaplaceCalibration(Sensitivity, Calibration):
    def calibrate(self, epsilon: float, delta: float) -> Answer:
        most = float(bound(self.sensitivity, epsilon, delta))
        if not math.isfinite(most):
            raise FedsimError(
                f"delta: {delta:g} at epsilon {epsilon:g} takes noise beyond what can be computed; "
                "use a larger delta or epsilon"
            )
        # What is found may lie beyond what may be asked.
        return _TruncatedLaplaceCurve.model_construct(
            sensitivity=self.sensitivity, scale=self.sensitivity / epsilon, bound=most
        ).delta(epsilon)


class _TruncatedLaplaceExperiment(Experiment):
    """A number that the row moves by `sensitivity`, behind truncated Laplace noise."""

    claims = _TruncatedLaplaceCurve
    sensitivity: PositiveSize = 1.0
    """Largest distance that one row moves the number."""
    scale: PositiveSize
    """b of the density exp(-|x| / b), in the units of the release."""
    bound: PositiveSize
    """The largest magnitude of the noise, in the units of the release."""

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        scale, bound = self.sabotage * self.scale, self.sabotage * self.bound
        # The inverse distribution function of the truncated exponential, at a uniform share.
        size = -scale * np.log1p(np.expm1(-bound / scale) * rng.random(draws))
        moved = self.sensitivity * present + rng.choice([-1.0, 1.0], draws) * size
        # |x| - |x - s|, without the rounding that would tell the neighbours apart
        ratio: Array
        ratio = np.clip(2 * moved - self.sensitivity, -self.sensitivity, self.sensitivity) / scale
        ratio[moved > bound] = math.inf
        ratio[moved < self.sensitivity - bound] = -math.inf
        return ratio


class KnownTruncatedLaplace(KnownMechanism):
    """Adds truncated Laplace noise to one number."""

    curve = _TruncatedLaplaceCurve
    calibration = _TruncatedLaplaceCalibration
    experiment = _TruncatedLaplaceExperiment
