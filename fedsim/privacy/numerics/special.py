"""Computes tails of the gamma distribution, and searches for roots, for the closed forms.

Everything broadcasts. `a` is half the degrees of freedom of a chi-square, `x` half its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics import work
from fedsim.types import FedsimError

Array = NDArray[np.float64]
Sloped = Callable[[Array], tuple[Array, Array]]
"""A function x -> (value, derivative), both of the shape of x."""


def require_range(name: str, value: ArrayLike, low: float, high: float, expected: str) -> Array:
    """Returns `value` as a float64 array whose entries are in [`low`, `high`].

    Args:
        name: the argument's name, for the message.
        value: a number, or an array of any shape.
        low: least entry that is taken.
        high: largest entry that is taken.
        expected: what the argument takes, in words for the message.

    Raises:
        FedsimError: an entry is no number, NaN or outside of the range.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedsimError(f"{name}: got {value!r}; expected {expected}") from error
    except OverflowError as error:
        raise FedsimError(f"{name}: got too large a number; expected {expected}") from error
    wrong = ~((array >= low) & (array <= high))
    if wrong.any():
        raise FedsimError(f"{name}: got {array[wrong].flat[0]:g}; expected {expected}")
    return array


def require_positive(name: str, value: ArrayLike) -> Array:
    """Returns `value` as an array; an entry that is not finite or not above 0 is a FedsimError."""
    kind = np.finfo(float)
    return require_range(name, value, kind.tiny, kind.max, "a finite number above 0")


def require_epsilon(value: ArrayLike) -> Array:
    """Returns `value` as an array; an entry that is not finite or below 0 is a FedsimError."""
    return require_range(
        "epsilon", value, 0.0, np.finfo(float).max, "a finite number of at least 0"
    )


def require_delta(value: ArrayLike) -> Array:
    """Returns `value` as an array; an entry not strictly between 0 and 1 is a FedsimError."""
    tiny = np.nextafter(0.0, 1.0)
    return require_range("delta", value, tiny, np.nextafter(1.0, 0.0), "a probability in (0, 1)")


def log_gamma_term(a: Array, excess: Array) -> Array:
    """Computes ln(x^a exp(-x) / Γ(a)) at x = a (1 + excess) > 0, a > 0, in the broadcast shape."""
    return -a * (excess - np.log1p(excess)) + np.log(a / (2 * np.pi)) / 2 - _stirling(a)


def _stirling(a: Array) -> Array:
    """Computes log Γ(a) - ((a - 1/2) log a - a + log(2 π) / 2), the rest of Stirling's formula."""
    from scipy.special import gammaln

    # From 16 on the first term left out of the series, 1 / (1188 a⁹), is below 2e-14.
    near = np.minimum(a, 16.0)
    exact = gammaln(near) - ((near - 0.5) * np.log(near) - near + np.log(2 * np.pi) / 2)
    far = np.maximum(a, 16.0)
    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / far**2) / far**2) / far**2) / far
    return np.asarray(np.where(a < 16, exact, series))


def log_gammaincc(a: Array, x: Array) -> Array:
    """Computes ln Pr[X >= x], X ~ Γ(a, 1), for a > 0 and x >= 0 (broadcast), also at underflow."""
    from scipy.special import gammaincc

    a, x = np.broadcast_arrays(a, x)
    upper = np.atleast_1d(gammaincc(a, x))
    # Close to the least double SciPy's value loses its
    # digits: the logarithm is then found directly.
    deep = np.atleast_1d(upper < 1e-280)
    with np.errstate(divide="ignore"):
        result = np.asarray(np.log(upper))
    if deep.any():
        at, beyond = np.atleast_1d(a)[deep], np.atleast_1d(x)[deep]
        # Legendre's continued fraction from its tail; so far out it converges at once.
        value = beyond + 401 - at
        for i in range(200, 0, -1):
            value = beyond + 2 * i - 1 - at - i * (i - at) / value
        result[deep] = log_gamma_term(at, beyond / at - 1) - np.log(value)
    return result.reshape(a.shape)


def log_gammainc(a: Array, x: Array) -> Array:
    """Computes ln Pr[X <= x], X ~ Γ(a, 1), for a > 0 and x >= 0 (broadcast), also at underflow."""
    from scipy.special import gammainc

    a, x = np.broadcast_arrays(a, x)
    lower = np.atleast_1d(gammainc(a, x))
    deep = np.atleast_1d((lower < 1e-280) & (x > 0))
    with np.errstate(divide="ignore"):
        result = np.asarray(np.log(lower))
    if deep.any():
        at, below = np.atleast_1d(a)[deep], np.atleast_1d(x)[deep]
        total = term = 1 / at
        for i in range(1, 500):  # x is far below a: the terms fall at once
            term = term * below / (at + i)
            total = total + term
        result[deep] = log_gamma_term(at, below / at - 1) + np.log(total)
    return result.reshape(a.shape)


@cache
def legendre(count: int) -> tuple[Array, Array]:
    """Returns (nodes, weights) of Gauss and Legendre on (0, 1), cached: do not change them.

    Both are (`count`,); nodes ascend, and weights have the sum 1.
    """
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1) / 2, weights / 2


def solve(
    function: Sloped, low: Array, high: Array, *, tolerance: float = 2 * np.finfo(float).eps
) -> Array:
    """Finds the roots of an increasing `function`, by safeguarded Newton, in the ends' shape.

    Args:
        function: maps x to its value and derivative, both of the shape of x.
        low: lower ends of the brackets.
        high: upper ends, broadcast with `low`; without a root the nearer end is the answer.
        tolerance: the search stops when all steps are below it, relative to x.
    """
    low, high = (np.array(end, dtype=np.float64) for end in np.broadcast_arrays(low, high))
    x = (low + high) / 2
    last = before = high - low
    for _ in range(300):
        value, slope = function(x)
        # Every value narrows the bracket, whichever step comes next; a NaN counts as too high.
        low, high = np.where(value < 0, x, low), np.where(value < 0, high, x)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            newton = x - value / slope
            good = (newton >= low) & (newton <= high) & (2 * np.abs(newton - x) <= before)
            good &= np.isfinite(value) & np.isfinite(slope)
        new = np.where(good, newton, (low + high) / 2)
        before, last = last, np.abs(new - x)
        x = new
        if (last <= tolerance * np.abs(x)).all():
            break
    return x


def least(holds: Callable[[float], bool], *, most: float, tolerance: float = 0.0) -> float:
    """Finds by bisection the least x >= 0 from which on `holds` is true; inf if it is not found.

    No x above the largest power of two up to `most` is tried. `holds` is true at the result, which
    is too large by at most `tolerance` relative to x, or 2^-60 if that is more.
    """
    if holds(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > most:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        if high - low < tolerance * high or not low < middle < high:
            break
        # `holds` has been asked of `high` at every turn, so that what is returned is known to hold.
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def least_epsilon(
    log_delta: Callable[[float], float],
    target: float,
    *,
    xtol: float,
    rtol: float,
    most: float = math.inf,
) -> float:
    """Finds the least ε >= 0 at which a falling `log_delta` is at most `target`.

    Args:
        log_delta: maps ε to ln δ.
        target: logarithm of the δ that is asked for.
        xtol: absolute tolerance; it or `rtol` is kept.
        rtol: relative tolerance.
        most: no ε above the largest power of two up to it is tried; then the result is inf. By
            default some ε has to be enough, or the search does not end.
    """
    from scipy.optimize import brentq

    def excess(at: float) -> float:
        # brentq needs finite numbers, and log δ is -∞ where δ is 0.
        return max(log_delta(at), -1e300) - target

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > most:
            return math.inf
    found = float(brentq(excess, 0.0, high, xtol=xtol, rtol=rtol))
    return max(found, np.finfo(float).tiny)  # 0 is not enough


_TOLERANCE = 0.005
"""The ε found is at most that much below the one asked for, relative."""
_DIGITS = 5
"""Digits of a noise multiplier, rounded up: it reads well, and is the same on every machine."""
_RANGE = (1e-6, 1e9)
_MOST = 60
"""Most questions to the accountant; a few suffice where ε falls smoothly."""
_USUAL = 8
"""Questions that a search usually takes, by which its progress is told."""
_FARTHEST = math.log(64)
"""Longest step of the bracketing, in log noise."""


def least_noise(epsilon_of: Callable[[float], float], target: float) -> float:
    """Finds the least noise multiplier, in five digits, whose ε is at most `target`.

    Noise for which ε is within 0.5% of it counts as the least. `epsilon_of` computes ε of a noise
    multiplier, and falls as that grows. A FedsimError says that the target is 0, that no noise up
    to 10^9 is enough, or that noise of 10^-6 is enough already.
    """
    if target <= 0:
        raise FedsimError("epsilon: 0 takes noise without end; ask for one above 0")
    asked = 0

    def excess(at: float) -> float:
        nonlocal asked
        with work.part(min(asked, _USUAL - 1), _USUAL):
            # Asked of the rounded multiplier, which is what is returned:
            # the claim is known for that very number.
            found = epsilon_of(_round_up(math.exp(at)))
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
    return _round_up(math.exp(high))


def _round_up(value: float) -> float:
    """Rounds `value` up to five significant digits, such as 1.2345678 to 1.2346."""
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    # The quotient's own rounding must not lift a number that has five digits already.
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{_DIGITS}g}")
