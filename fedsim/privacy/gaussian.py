"""The exact privacy curve of the Gaussian mechanism.

Source: Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy: Analytical
Calibration and Optimal Denoising, ICML 2018, Theorem 8. It holds for every ε, unlike the classical
σ = sqrt(2 log(1.25 / δ)) / ε, which is proven for ε < 1 only.
"""

from __future__ import annotations

import math


def epsilon(noise_multiplier: float, delta: float) -> float:
    """The least ε >= 0 such that the mechanism is (ε, δ)-differentially private.

    `noise_multiplier` is the standard deviation over the L2 sensitivity; `delta` in (0, 1). T
    adaptive releases with noise multipliers z are one with z / sqrt(T) (Dong, Roth and Su, Gaussian
    Differential Privacy, JRSS-B 2022, Corollary 3.3).

    >>> round(epsilon(1.1, 1e-5), 3)
    3.921
    >>> epsilon(1e9, 1e-5), epsilon(0.0, 1e-5)
    (0.0, inf)
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    if noise_multiplier == 0:
        return math.inf
    mu = 1 / noise_multiplier
    # δ falls with c = ε / μ - μ / 2 and is below Φ(-c). As a function of ε it would need the
    # difference of two numbers that grow with ε.
    low, high = -_WIDEST, 1 - float(ndtri(delta))
    target = math.log(delta)
    if _log_delta(low, mu) <= target:
        return 0.0
    c = float(brentq(lambda at: _log_delta(at, mu) - target, low, high, xtol=1e-12))
    return max(0.0, mu * (c + mu / 2))


_WIDEST = 37.0
"""Φ(-c) is 1 in double precision for c below -37."""


def _log_delta(c: float, mu: float) -> float:
    """log(Φ(-c) - exp(ε) Φ(-c - μ)) = log φ(c) + log(R(c) - R(c + μ)), R being Mills' ratio."""
    from scipy.special import erfcx

    def ratio(x: float) -> float:
        return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))

    difference = ratio(c) - ratio(c + mu)
    if difference <= 0:
        return -math.inf
    return -(c**2) / 2 - math.log(2 * math.pi) / 2 + math.log(difference)


def log_delta(noise_multiplier: float, epsilon: float) -> float:
    """The natural logarithm of the least δ at ε >= 0, right where δ underflows; -inf for δ = 0.

    >>> round(math.exp(log_delta(1.0, 1.0)), 6)
    0.126937
    """
    if noise_multiplier == 0:
        return 0.0
    mu = 1 / noise_multiplier
    c = epsilon / mu - mu / 2
    return 0.0 if c < -_WIDEST else min(0.0, _log_delta(c, mu))
