"""The privacy curve of T Gaussian releases on Poisson samples, at a bounded cost for any noise.

dp_accounting's privacy loss distributions have one point for each multiple of the step between
losses, and a loss reaches 1 / (2 z²): the step grows where the noise z is small, which rounds the
claim up. No δ below their rounding is proven by them. There Rényi divergences go on (Mironov,
Talwar and Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019). Where z is so
small that a batch shows who is in it, the claim is the mean over the batches, taken for known.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fedsim.privacy.composition import correlated
from fedsim.privacy.composition.correlated import Array

PLD = "dp_accounting PLD"
RENYI = "RDP, Poisson sampling"
REVEALED = "exact Gaussian, averaged over the batches, which may be known"
_POINTS = 1 << 17
"""Most points of one step's losses."""
_FINEST = 1e-4
_LEAST_NOISE, _MOST_NOISE = 0.1, 1e5
"""Range of noise multipliers whose losses are computed. More noise is accounted as the largest."""
_MOST_STEPS = 100_000
_ROUNDING = 2.3e-16
"""Rounding that a convolution adds to a probability, for each of the steps."""
_ORDERS = (*range(2, 512), *range(512, 1025, 4))
"""Orders of the Rényi divergences: whole numbers, whose sums have no terms that cancel."""
_ROUNDING_OF_LOGS = 1e-11
"""Relative rounding of a moment's logarithm, whose terms are logarithms up to 1e4."""


def least_bound(
    noise: float, epsilon: float, *, steps: int, sampling_rate: float
) -> tuple[float, str]:
    """Returns (ln of a proven bound on δ at ε, its method): the least of up to three bounds.

    One takes batches for known. For noise from 0.1 on there is one by Rényi divergences and, for up
    to 100,000 steps, one by privacy loss distributions. Neighbours have an example more or less.

    Args:
        noise: standard deviation of a step's noise over the clipping norm.
        epsilon: at least 0; less is a FedsimError.
        steps: number of releases.
        sampling_rate: probability of an example to be in a step's sample, in (0, 1].
    """
    known = correlated.log_delta_revealed(
        noise, epsilon, steps=steps, sampling_rate=sampling_rate, correlation=0.0
    )
    bounds = [(known, REVEALED)]
    if noise >= _LEAST_NOISE:
        noise = min(noise, _MOST_NOISE)
        bounds.append((_renyi(noise, epsilon, steps, sampling_rate), RENYI))
        if steps <= _MOST_STEPS:
            losses = _distribution(sampling_rate, noise, steps)
            # The convolution's rounding is added to δ. A smaller δ is left to the Rényi bound.
            found = float(losses.get_delta(epsilon)) + _ROUNDING * max(steps, 1000)
            bounds.append((math.log(found), PLD))
    return min(bounds)


def _renyi(noise: float, epsilon: float, steps: int, sampling_rate: float) -> float:
    """Computes log δ at ε by the best order (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    orders = np.array(_ORDERS, dtype=np.float64)
    # Their factor (1 - 1/α)^α / (α - 1) is (1 - 1/α)^(α - 1) / α.
    lost = steps * _divergences(sampling_rate, noise) - epsilon + np.log1p(-1 / orders)
    return min(0.0, float(((orders - 1) * lost - np.log(orders)).min()))


@lru_cache(maxsize=64)
def _divergences(sampling_rate: float, noise: float) -> Array:
    """Computes the Rényi divergences of one release at each of the orders, rounded up."""
    from scipy.special import gammaln, logsumexp, xlog1py

    moments = []
    # That of order a is log Σ_k C(a, k) (1 - q)^(a - k) q^k exp((k² - k) / (2 z²)) / (a - 1).
    for order in _ORDERS:
        k = np.arange(order + 1)
        ways = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        # xlog1py makes 0 log 0 = 0, for the last term at q = 1.
        drawn = k * math.log(sampling_rate) + xlog1py(order - k, -sampling_rate)
        moments.append(logsumexp(ways + drawn + (k * k - k) / (2 * noise**2)))
    # Enlarged by more than rounding can take off: a Rényi divergence too small claims too much.
    log_rounding = _ROUNDING_OF_LOGS * (1 + np.abs(moments))
    divergences: Array = (np.array(moments) + log_rounding) / (np.array(_ORDERS) - 1)
    return divergences


def _interval(sampling_rate: float, noise: float, steps: int) -> float:
    """Chooses the step between losses of dp_accounting's grid, for `steps` releases."""
    # One release has at most `_POINTS` losses, and all together have at most 32 times as many.
    # A step that takes the example loses N(1 / (2 z²), 1 / z²): the mean and 12 deviations.
    reach = 0.5 / noise**2 + 12 / noise
    # A step's loss deviates by about q sqrt(χ²), or by a whole loss in a share q of the steps.
    deviation = min(
        sampling_rate * math.sqrt(math.expm1(min(noise**-2, 50.0))),
        math.sqrt(sampling_rate) * (0.5 / noise**2 + 1 / noise),
    )
    width = min(steps * reach, reach + 30 * math.sqrt(steps) * deviation)
    return max(_FINEST, reach / _POINTS, width / (32 * _POINTS))


@lru_cache(maxsize=8)
def _distribution(sampling_rate: float, noise: float, steps: int) -> Any:
    """Builds dp_accounting's PLD accountant of so many releases; it is cached: do not change it."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    step = _interval(sampling_rate, noise, steps)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, step)
    accountant.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise)), steps)
    return accountant
