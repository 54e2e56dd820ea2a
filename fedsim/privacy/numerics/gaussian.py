"""The exact privacy curve of the Gaussian mechanism.

Source: Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy: Analytical
Calibration and Optimal Denoising, ICML 2018, Theorem 8. It holds for every ε, unlike the classical
σ = sqrt(2 log(1.25 / δ)) / ε, which is proven for ε < 1 only.

With z the noise multiplier (the standard deviation over the L2 sensitivity), μ = 1/z and
c = ε/μ - μ/2: δ = Φ(-c) - exp(ε) Φ(-c - μ) = φ(c) (R(c) - R(c + μ)), R being Mills' ratio. The two
terms of the first form agree to many digits where μ is small; the second is an integral of
-R' > 0. T adaptive releases with noise multipliers z are one with z / sqrt(T) (Dong, Roth and Su,
Gaussian Differential Privacy, JRSS-B 2022, Corollary 3.3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedsim.privacy.numerics.special import (
    Array,
    legendre,
    require_delta,
    require_epsilon,
    require_range,
    solve,
)

_RANGE = "a number of at least 0"


def log_delta(noise_multiplier: ArrayLike, epsilon: ArrayLike) -> Array:
    """Computes ln δ(ε) of the Gaussian mechanism; the result is right where δ underflows.

    `noise_multiplier` is the noise's standard deviation over the L2 sensitivity: 0 gives δ = 1, inf
    δ = 0. Both directions are alike. The arguments broadcast. A FedsimError refuses a multiplier
    below 0 and an ε that is not in [0, ∞).

    >>> np.exp(log_delta([1.1, 0.0], 1.0)).round(6)
    array([0.096146, 1.      ])
    """
    multiplier = require_range("noise_multiplier", noise_multiplier, 0.0, np.inf, _RANGE)
    with np.errstate(divide="ignore", invalid="ignore"):
        mu = 1 / multiplier
        c = require_epsilon(epsilon) / mu - mu / 2
        # No noise gives c = -∞ (δ = 1), endless noise c = ∞ (δ = 0); the formula has NaN for both.
        c = np.where(np.isinf(mu), -np.inf, np.where(mu == 0, np.inf, c))
    return _log_curve(c, mu)


def epsilon(noise_multiplier: ArrayLike, delta: ArrayLike) -> Array:
    """Computes the least ε >= 0 at which Gaussian noise is (ε, δ)-private; inf for no noise.

    `noise_multiplier` is as of `log_delta`, and the arguments broadcast. A FedsimError refuses a
    multiplier below 0 and a δ that is not in (0, 1).

    >>> float(epsilon(1.1, 1e-5).round(3))
    3.921
    >>> float(epsilon(1e9, 1e-5)), float(epsilon(0.0, 1e-5))
    (0.0, inf)
    """
    from scipy.special import ndtri

    multiplier = require_range("noise_multiplier", noise_multiplier, 0.0, np.inf, _RANGE)
    multiplier, target = np.broadcast_arrays(multiplier, require_delta(delta))
    log_target = np.log(target)
    with np.errstate(divide="ignore"):
        mu = np.minimum(1 / multiplier, 1e300)
    zero = -mu / 2

    def falling(c: Array) -> tuple[Array, Array]:
        value = _log_curve(c, mu)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            slope = np.exp(np.log(mu) + _log_normal(c) + _log_mills(c + mu) - value)
        return log_target - value, slope

    # δ falls with c and is below Φ(-c). As a function of ε it would need the difference of two
    # numbers that grow with ε.
    c = solve(falling, np.maximum(zero, -40.0), np.maximum(1 - ndtri(target), zero))
    with np.errstate(over="ignore"):
        found = np.maximum(0.0, mu * (c + mu / 2))
    # With δ(0) below the target already, the root would lie at a negative ε.
    found = np.where(_log_curve(zero, mu) <= log_target, 0.0, found)
    return np.where(multiplier == 0, np.inf, found)[()]


def noise_multiplier(epsilon: ArrayLike, delta: ArrayLike) -> Array:
    """Computes the least standard deviation of (ε, δ)-private Gaussian noise.

    It is in units of the L2 sensitivity. The arguments broadcast. A FedsimError refuses an ε that
    is not in [0, ∞) and a δ that is not in (0, 1).

    >>> float(noise_multiplier(1.0, 1e-5).round(4))
    3.7306
    """
    eps, target = np.broadcast_arrays(require_epsilon(epsilon), require_delta(delta))
    log_target = np.log(target)

    def rising(log_mu: Array) -> tuple[Array, Array]:
        mu = np.exp(log_mu)
        c = eps / mu - mu / 2
        value = _log_curve(c, mu)
        with np.errstate(over="ignore", invalid="ignore"):
            slope = np.exp(log_mu + _log_normal(c) - value)
        # Far out, where that is the difference of huge logarithms, log δ is -(ε / μ)² / 2.
        return value - log_target, np.where(value < -1e8, -2 * value, slope)

    # δ is below μ at every ε, and 1 to double precision once μ is 80 above sqrt(2 ε).
    low, high = np.log(target), np.log(80 + np.sqrt(2 * eps))
    return np.exp(-solve(rising, low, high))[()]


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def _log_curve(c: Array, mu: Array) -> Array:
    """Computes log(Φ(-c) - exp(ε) Φ(-c - μ)); c = ε / μ - μ / 2 is at least -μ / 2."""
    from scipy.special import ndtr

    c, mu = (np.array(array) for array in np.broadcast_arrays(c, mu))
    result = np.full(c.shape, -np.inf)
    near = np.maximum(c, 1.0)
    # Here the two terms agree in their leading digits, so that -R' > 0 is integrated.
    close = (mu > 0) & (mu < 0.1 * near) & np.isfinite(c)
    if close.any():
        # The integrand varies on the scale of max(c, 1): few nodes are exact.
        nodes, weights = legendre(10)
        at = c[close, None] + mu[close, None] * nodes
        result[close] = _log_normal(c[close]) + np.log(mu[close] * (_mills_slope(at) @ weights))
    apart = (mu > 0) & ~close
    above = apart & (c > 0) & np.isfinite(c)
    if above.any():
        low, high = c[above], (c + mu)[above]
        # Mills' ratios stay finite where φ(c) underflows; it enters by its logarithm alone.
        ratio = np.exp(_log_mills(high) - _log_mills(low))
        result[above] = _log_normal(low) + _log_mills(low) + np.log1p(-ratio)
    below = apart & (c <= 0)
    if below.any():
        low, high = c[below], (c + mu)[below]
        # For c <= 0 δ is not small: 1 less both tails has no underflow to avoid.
        second = np.where(np.isinf(low), 0.0, np.exp(_log_normal(low) + _log_mills(high)))
        result[below] = np.log1p(-ndtr(low) - second)
    found: Array = result[()]
    return found


def _log_normal(x: Array) -> Array:
    return np.asarray(-(x**2) / 2 - np.log(2 * np.pi) / 2)


def _log_mills(x: Array) -> Array:
    """Computes the logarithm of Mills' ratio R(x) = Φ(-x) / φ(x)."""
    from scipy.special import erfcx, log_ndtr

    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # erfcx has exp(x² / 2) in it, so that the ratio of tail and density does not underflow.
        positive = np.log(erfcx(np.maximum(x, 0.0) / np.sqrt(2))) + np.log(np.pi / 2) / 2
        return np.asarray(np.where(x > 0, positive, log_ndtr(-x) - _log_normal(x)))


def _mills_slope(x: Array) -> Array:
    """Computes -R'(x) = 1 - x R(x) for x > -1; by its asymptotic series where both terms agree."""
    from scipy.special import erfcx

    # By Horner from the innermost factor. At 20 the twelve terms are exact to 1e-16.
    far = np.maximum(x, 20.0) ** -2
    series = np.zeros_like(far)
    for k in range(23, 0, -2):  # x^-2 - 3 x^-4 + 15 x^-6 - ...
        series = far * k * (1 - series) if k > 1 else far * (1 - series)
    near = np.clip(x, -1.0, 20.0)
    direct = 1 - near * np.sqrt(np.pi / 2) * erfcx(near / np.sqrt(2))
    return np.asarray(np.where(x > 20, series, direct))
