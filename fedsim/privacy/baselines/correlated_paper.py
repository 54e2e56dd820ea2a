"""The closed forms of the KAN paper, as it states them: to compare with, not to rely on.

Source: Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated
Noise, 2026, Theorem F.12 (Theorem 5.1 in the body). Its constants are rebuilt: the published text
has lost its formulas. Its tail bound (Lemma F.10) counts participations and its last step is the
classical Gaussian mechanism, which is proven for ε <= 1 only. Theorem F.8, which it is derived
from, states for batches of a fixed size what is true of Poisson sampling.
"""

from __future__ import annotations

import math

from fedsim.types import FedsimError

METHOD = "Theorem F.12 of the KAN paper (its Gaussian step is proven for ε <= 1)"
_SHARE = 0.5
"""α: the share of δ that goes to the tail of the participations."""


def noise(
    epsilon: float, delta: float, *, steps: int, sampling_rate: float, correlation: float
) -> float:
    """The noise multiplier that Theorem F.12 asks for.

    sqrt((1 + η) T q) sqrt(2 ln(1.25 / ((1 - α) δ))) / ((1 - λ) ε) with α = 1/2 and
    η = sqrt(3 ln(1 / (α δ)) / (T q)).

    Raises:
        FedsimError: ε is 0, or η > 1, so that the theorem does not apply.
    """
    if epsilon <= 0:
        raise FedsimError("variant paper: Theorem F.12 needs ε > 0: use variant: exact")
    participations = steps * sampling_rate
    slack = math.sqrt(3 * math.log(1 / (_SHARE * delta)) / participations)
    if slack > 1:
        raise FedsimError(
            f"variant paper: Theorem F.12 needs steps x sampling_rate >= 3 log(2 / δ) = "
            f"{slack**2 * participations:.4g} and has {participations:.4g}: use variant: exact"
        )
    gaussian = math.sqrt(2 * math.log(1.25 / ((1 - _SHARE) * delta)))
    return math.sqrt((1 + slack) * participations) * gaussian / ((1 - correlation) * epsilon)


def least_delta(steps: int, sampling_rate: float) -> float:
    """The least δ that the theorem speaks of: where η = 1."""
    return math.exp(-steps * sampling_rate / 3) / _SHARE
