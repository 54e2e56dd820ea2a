"""The privacy curve of T Gaussian releases on Poisson samples, at a bounded cost for any noise.

By dp_accounting's privacy loss distributions. Their grid has one point for each multiple of the
step between losses, and a loss reaches 1 / (2 z²): the step grows where the noise z is small, which
rounds the claim up. Where z is so small that a batch shows who is in it, the claim is the mean over
the batches, taken for known (`correlated.log_delta_revealed`), which is never too low.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from fedsim.privacy.composition import correlated

PLD = "dp_accounting PLD"
POINTS = 1 << 17
"""Most points of one step's losses."""
_FINEST = 1e-4
LEAST_NOISE, _MOST_NOISE = 0.1, 1e5
"""Where losses are gone through. More noise than that is accounted as that, which is less."""
_MOST_STEPS = 100_000
_ROUNDING = 2.3e-16
"""What a convolution adds to the rounding of a probability, for each of the steps."""


def log_delta(noise: float, epsilon: float, *, steps: int, sampling_rate: float) -> float:
    """log of the least proven δ at ε of an example that is there, or is not."""
    known = correlated.log_delta_revealed(
        noise, epsilon, steps=steps, sampling_rate=sampling_rate, correlation=0.0, factor=1.0
    )
    if noise < LEAST_NOISE or steps > _MOST_STEPS:
        return known
    losses = distribution(sampling_rate, min(noise, _MOST_NOISE), steps)
    found = float(losses.get_delta(epsilon)) + _ROUNDING * max(steps, 1000)
    return min(known, math.log(found))


def interval(sampling_rate: float, noise: float, steps: int) -> float:
    """The step between losses: that many points of one release, and 32 times of all together."""
    reach = 0.5 / noise**2 + 12 / noise
    deviation = min(
        sampling_rate * math.sqrt(math.expm1(min(noise**-2, 50.0))),
        math.sqrt(sampling_rate) * (0.5 / noise**2 + 1 / noise),
    )
    width = min(steps * reach, reach + 30 * math.sqrt(steps) * deviation)
    return max(_FINEST, reach / POINTS, width / (32 * POINTS))


@lru_cache(maxsize=8)
def distribution(sampling_rate: float, noise: float, steps: int) -> Any:
    """dp_accounting's PLD accountant of Poisson-sampled Gaussian releases."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    step = interval(sampling_rate, noise, steps)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, step)
    accountant.compose(PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise)), steps)
    return accountant
