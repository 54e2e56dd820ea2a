"""Truncated Laplace noise on every entry of a vector that moves by β in L2 norm.

DP-NTK regression (Lemmas G.1 and G.2) takes the bound of one number
(`fedsim.privacy.mechanisms.laplace`) at the L1 sensitivity sqrt(d) β. That is proven, and
wasteful: the entries' losses are independent, and d of them rarely agree in sign. Here is what is
proven of any scale b and bound B (per entry, in the units of β). Let the entries move by b t_j, Σ
t_j² <= t², t = β / b.

- An entry's noise leaves the other's support with probability at most exp(t_j) - 1 over
  2 (exp(B/b) - 1), so that δ∞, the probability that any does, is at most Σ expm1(t_j) over that.
  For t <= 1 that is largest for equal t_j (expm1(sqrt(x)) is concave below x = 1); beyond it is
  below sqrt(d) expm1(t) and expm1(sqrt(d) t).
- On the common support both densities are within exp(±t_j): randomized response of that ε at worst
  (Kairouz, Oh and Viswanath, The Composition Theorem for Differential Privacy, 2015). All together
  are within exp(±sqrt(d) t), *and* no worse than a Gaussian mechanism with μ = sqrt(π/2) t, since
  randomized response of t_j is none worse than one with μ_j = 2 Φ⁻¹(1 / (1 + exp(-t_j)))
  <= sqrt(π/2) t_j (at FPR = FNR, and elsewhere by convexity), and those compose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import ArrayLike

from fedsim.contracts.guarantee import CurveMechanism
from fedsim.privacy.mechanisms import laplace
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import Array, require_epsilon, require_positive, require_range
from fedsim.types import FedsimError

ScaleChoice = Literal["tight", "paper"]

_GAUSSIAN = math.sqrt(math.pi / 2)
_OUTSIDE = 0.1
"""Share of δ that `calibrate_noise` spends on δ∞: the bound depends on it by a logarithm only."""

_UP = 1 + 1e-12
"""Factor on a scale found for an ε, so that rounding does not lift the stated ε above it."""


def _outside(distance: float, scale: float, bound: float, dimension: int) -> float:
    """Bounds δ∞, the probability that some entry's noise tells neighbours apart for sure."""
    for name, value in (("distance", distance), ("scale", scale), ("bound", bound)):
        require_positive(name, value)
    if dimension < 1:
        raise FedsimError(f"dimension: got {dimension}; expected at least 1")
    with np.errstate(over="ignore"):
        lost = _spread(distance / scale, dimension) / (2 * np.expm1(bound / scale))
    return float(min(1.0, lost))


def _log_delta(
    distance: float, scale: float, bound: float, dimension: int, epsilon: ArrayLike
) -> Array:
    """Computes log of the least δ proven, in the shape of `epsilon` and alike both ways."""
    lost = _outside(distance, scale, bound, dimension)
    t = distance / scale
    eps = require_epsilon(epsilon)
    spread = np.exp(gaussian.log_delta(1 / (_GAUSSIAN * t), eps))
    most = math.sqrt(dimension) * t
    # Randomized response of ε0: (exp(ε0) - exp(ε)) / (1 + exp(ε0)).
    response = -np.expm1(np.minimum(eps - most, 0.0)) / (1 + math.exp(-most))
    with np.errstate(divide="ignore"):
        # A release outside of the common support costs δ in full;
        # within it, the better of two bounds holds.
        return np.log(lost + (1 - lost) * np.minimum(spread, response))


@final
@dataclass(frozen=True, kw_only=True)
class LaplaceRelease(CurveMechanism):
    """Adds truncated Laplace noise to `dimension` entries that move by at most `beta` in L2 norm.

    Its density on ± `bound` is proportional to exp(-|x| / `scale`). `beta`: see the base class.
    """

    scale: float
    bound: float
    dimension: int
    accountant: str = "truncated Laplace noise"

    def log_delta(self, epsilons: Array) -> Array:
        """Computes ln δ at each of `epsilons` >= 0; a FedsimError refuses fields not above 0."""
        return _log_delta(self.beta, self.scale, self.bound, self.dimension, epsilons)


def calibrate_noise(
    distance: float,
    dimension: int,
    epsilon: float,
    delta: float,
    calibration: ScaleChoice = "tight",
) -> tuple[float, float]:
    """Finds (scale, bound), as of `LaplaceRelease`, that make a noisy vector (ε, δ)-private.

    Args:
        distance: β, the largest L2 distance of neighbours' vectors, in whose units both are.
        dimension: d, the number of entries.
        epsilon: above 0.
        delta: in (0, 1); another is a FedsimError.
        calibration: `tight` finds the least scale that is proven to be enough; `paper` takes
            sqrt(d) β / ε, and the bound of one number of sensitivity sqrt(d) β.
    """
    require_range("delta", delta, np.finfo(float).tiny, 1.0, "a probability in (0, 1)")
    wide = math.sqrt(dimension) * distance
    if calibration == "paper":
        least = float(laplace.bound(wide, epsilon, delta))
        return wide / epsilon * _UP, least * _UP**2
    lost = _OUTSIDE * delta
    # The δ that is left for the common support, as `_log_delta` puts the two together.
    left = (delta - lost) / (1 - lost)
    spread = float(gaussian.noise_multiplier(epsilon, left)) * _GAUSSIAN * distance
    # Whichever of the two bounds holds at the smaller scale is used.
    if spread < wide / epsilon:
        scale = spread
    else:
        # Within exp(±ε) δ is needed for δ∞ alone (a hair less, lest rounding exceed it).
        scale, lost = wide / epsilon, delta * (1 - 1e-9)
    scale *= _UP
    return scale, scale * math.log1p(_spread(distance / scale, dimension) / (2 * lost))


def _spread(t: float, dimension: int) -> float:
    """Bounds Σ expm1(t_j) over `dimension` numbers t_j >= 0 with Σ t_j² <= t²."""
    root = math.sqrt(dimension)
    # Equal t_j are the worst up to here; beyond, the lesser of two bounds.
    if t <= 1:
        return dimension * math.expm1(t / root)
    with np.errstate(over="ignore"):
        return float(min(root * np.expm1(t), np.expm1(root * t)))
