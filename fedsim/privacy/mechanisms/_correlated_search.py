"""Searches for the least ε, and for the least noise, of correlated releases."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedsim.privacy.composition.dominating_pair import TooFewDraws
from fedsim.types import FedsimError

_LARGEST = 1e9
"""ε and noise multipliers are searched up to here."""
_SEARCH = 9
"""Curves that a search for noise estimates."""


def reached(delta: Callable[[], float], target: float) -> bool:
    """Whether δ is below the target; where hardly a draw is left in the tail, it is taken to be."""
    try:
        return delta() <= target
    except TooFewDraws:
        return True


def least(holds: Callable[[float], bool]) -> float:
    """The least x >= 0 for which `holds`, which it does from there on; inf if for none."""
    if holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        if high - low < 1e-10 * high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def searched(excess: Callable[[float], float], enough: float) -> tuple[float, float]:
    """(how fast log δ falls with log noise, about the noise at which the excess is 0).

    By regula falsi down from what is `enough`, in at most `_SEARCH` evaluations.
    """
    high = math.log(enough)
    low, at_high = high - math.log(2), excess(high)
    at_low, spent = excess(low), 2
    while at_low <= 0 and spent < _SEARCH:
        high, at_high, low = low, at_low, low - math.log(2)
        at_low, spent = excess(low), spent + 1
    while spent < _SEARCH and high - low > 0.01 and at_low > 0 > at_high:
        share = at_low / (at_low - at_high)
        middle = low + (high - low) * min(max(share, 0.1), 0.9)
        found, spent = excess(middle), spent + 1
        if found > 0:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    return min(max((at_low - at_high) / (high - low), 0.5), 1e3), math.exp(high)


def least_noise(holds: Callable[[float], bool], start: float, rounds: int = 40) -> float:
    """The least noise that is enough, to 2^-`rounds` of its logarithm's bracket.

    Raises:
        FedsimError: none is.
    """
    high = start
    while not holds(high):
        high *= 2
        if high > _LARGEST:
            raise FedsimError("correlated_gaussian: no noise reaches this ε and δ: raise them")
    low = high / 2
    while holds(low):
        low, high = low / 2, low
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
