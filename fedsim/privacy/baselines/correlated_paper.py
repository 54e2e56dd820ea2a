"""The closed form of the KAN paper, as far as it is proven, to compare with.

Source: Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated
Noise, 2026, Theorem F.12 (Theorem 5.1 in the body). Its constants are rebuilt: the published text
has lost its formulas. Its tail bound (Lemma F.10) counts participations and its last step is the
classical Gaussian mechanism, which is proven for ε <= 1 only: where that falls short, the exact
Gaussian mechanism stands in its place. Theorem F.8, which it is derived from, states for batches of
a fixed size what is true of Poisson sampling.
"""

from __future__ import annotations

import math

from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError

METHOD = "Theorem F.12 of the KAN paper (its Gaussian step exact where the paper's falls short)"
_SHARE = 0.5
"""α: the share of δ that goes to the tail of the participations."""


def noise(
    epsilon: float, delta: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """The noise multiplier that Theorem F.12 asks for.

    sqrt((1 + η) T q) sqrt(2 ln(1.25 / ((1 - α) δ))) / ((1 - λ) ε) with α = 1/2 and
    η = sqrt(3 ln(1 / (α δ)) / (T q)), or what the exact Gaussian mechanism takes, if that is more.

    Raises:
        FedsimError: ε is 0, or η > 1, so that the theorem does not apply.
    """
    if epsilon <= 0:
        raise FedsimError("variant paper: Theorem F.12 needs ε > 0: use variant: exact")
    reach = _reach(delta, steps=steps, sampling_rate=sampling_rate, correlation=correlation)
    exact = float(gaussian.noise_multiplier(epsilon, (1 - _SHARE) * delta))
    return reach * max(_classical(delta) / epsilon, exact)


def epsilon(
    noise: float, delta: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """The least ε for which `noise` is what the theorem asks for.

    Raises:
        FedsimError: η > 1.
    """
    reach = _reach(delta, steps=steps, sampling_rate=sampling_rate, correlation=correlation)
    exact = float(gaussian.epsilon(noise / reach, (1 - _SHARE) * delta))
    return max(_classical(delta) * reach / noise, exact)


def _classical(delta: float) -> float:
    """The noise of the classical Gaussian mechanism at ε = 1."""
    return math.sqrt(2 * math.log(1.25 / ((1 - _SHARE) * delta)))


def _reach(delta: float, *, steps: int, sampling_rate: float, correlation: float) -> float:
    """How far an example moves all releases, but with probability α δ."""
    participations = steps * sampling_rate
    slack = math.sqrt(3 * math.log(1 / (_SHARE * delta)) / participations)
    if slack > 1:
        raise FedsimError(
            f"variant paper: Theorem F.12 needs steps x sampling_rate >= 3 log(2 / δ) = "
            f"{slack**2 * participations:.4g} and has {participations:.4g}: use variant: exact"
        )
    return math.sqrt((1 + slack) * participations) / (1 - correlation)


def least_delta(steps: int, sampling_rate: float) -> float:
    """The least δ that the theorem speaks of: where η = 1."""
    return math.exp(-steps * sampling_rate / 3) / _SHARE
