"""The least noise by which an accountant states an ε that was asked for, in few questions to it."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedsim.privacy.numerics import work
from fedsim.types import FedsimError

_TOLERANCE = 0.005
"""The ε found is at most that much below the one asked for, relative."""
_DIGITS = 5
"""Digits of a noise multiplier, rounded up: it reads well, and is the same on every machine."""
_RANGE = (1e-6, 1e9)
"""Least and largest noise multiplier that is looked at."""
_MOST = 60
"""Most questions to the accountant; a few suffice where ε falls smoothly."""
_USUAL = 8
"""Questions that a search usually takes, by which its progress is told."""
_FARTHEST = math.log(64)
"""Longest step of the bracketing, in log noise."""


def least_noise(epsilon_of: Callable[[float], float], target: float) -> float:
    """Finds the least noise multiplier, in five digits, whose ε is at most `target`.

    `epsilon_of` computes ε of a noise multiplier, and falls as that grows.

    Raises:
        FedsimError: the target is 0, no noise is enough, or hardly any noise is enough already.
    """
    if target <= 0:
        raise FedsimError("epsilon: 0 takes noise without end; ask for one above 0")
    asked = 0

    def excess(at: float) -> float:
        nonlocal asked
        with work.part(min(asked, _USUAL - 1), _USUAL):
            # Asked of the rounded multiplier, which is what is returned:
            # the claim is known for that very number.
            found = epsilon_of(rounded_up(math.exp(at)))
        asked += 1
        return math.log(min(max(found, 1e-12), 1e12) / target)

    low, high = 0.0, 0.0
    at_low = at_high = excess(0.0)
    while at_high > 0:
        if high >= math.log(_RANGE[1]):
            raise FedsimError(
                f"epsilon: {target:g} is not reached by any noise up to {_RANGE[1]:g} times the "
                "norm; raise epsilon or privacy.delta"
            )
        low, at_low = high, at_high
        # If ε falls as 1 / z², half of its logarithm's excess is
        # the whole way; a doubling is the least.
        high += min(max(at_high / 2, math.log(2)), _FARTHEST)
        at_high = excess(high)
    while at_low <= 0:
        if low <= math.log(_RANGE[0]):
            raise FedsimError(
                f"epsilon: {target:g} is claimed with hardly any of this noise: what the ledger "
                "states of this stack does not follow from it; declare noise_multiplier"
            )
        high, at_high = low, at_low
        # Within the tolerance already, a hair less noise is enough to bracket the answer.
        low -= min(max(-at_low / 2, math.log(2)), _FARTHEST) if at_low < -_TOLERANCE else 1e-4
        at_low = excess(low)
    bisect = False
    while at_high < -_TOLERANCE and high - low > 10.0**-_DIGITS and asked < _MOST:
        # Aimed at the middle of the tolerance below the target, so
        # that a miss on either side may still do.
        share = 0.5 if bisect else (at_low + _TOLERANCE / 2) / (at_low - at_high)
        middle = low + (high - low) * min(max(share, 0.02), 0.98)
        found, width = excess(middle), high - low
        if found > 0:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
        # A line through two points far apart may creep; halving never does.
        bisect = high - low > 0.7 * width
    return rounded_up(math.exp(high))


def rounded_up(value: float) -> float:
    """Rounds `value` up to five significant digits.

    >>> rounded_up(1.2345678)
    1.2346
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    # The quotient's own rounding must not lift a number that has five digits already.
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{_DIGITS}g}")
