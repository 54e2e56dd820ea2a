"""A lower bound of ε from one run with many canaries.

Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023: each of m
canaries is included by a fair coin of its own, an attacker guesses some of the coins from what the
run released, and of an (ε, δ)-private run hardly more than a share of 1 / (1 + exp(-ε)) of the
guesses can be right (Theorem 5.2; algorithm of Appendix D). Canaries are examples (or clients) that
are added or left out; their contributions need not be independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fedsim.audit.bounds import LowerBound, error_probability
from fedsim.types import FedsimError
from fedsim.words import number_of

_HIGHEST = 64.0
"""Of ε: above it a guess of an ε-private run may always be right, in double precision."""


def one_run_bound(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.99,
    guesses: Sequence[int] | None = None,
) -> LowerBound:
    """The ε that a run's canaries refute.

    Args:
        scores: (m,) of the canaries, the higher the likelier included.
        included: (m,) booleans, each from a fair coin of its own.
        delta: in (0, 1).
        confidence: in (0, 1).
        guesses: even numbers of canaries to guess, half of them (the highest) as included and half
            (the lowest) as left out. They must not depend on `included`. Several share the error
            probability. By default m, m / 2, m / 4 and m / 8.

    Raises:
        FedsimError: an argument is out of range, shapes differ, a score is NaN, or there is no
            canary.

    >>> included = np.random.default_rng(0).random(1000) < 0.5
    >>> round(one_run_bound(included + 0.0, included, delta=1e-5).epsilon, 2)  # nothing hidden
    4.22
    """
    error = error_probability(delta, confidence)
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if values.ndim != 1 or values.shape != truth.shape or truth.dtype != np.bool_:
        raise FedsimError(
            f"scores {values.shape} and included {truth.shape} of {truth.dtype}: "
            "expected a score and a boolean for every canary"
        )
    if np.isnan(values).any():
        raise FedsimError("scores: a score is NaN; the score has to order every canary")
    canaries = len(values)
    counts = _counts(canaries) if guesses is None else list(guesses)
    if not counts or not all(0 < n <= canaries and n % 2 == 0 for n in counts):
        raise FedsimError(
            f"guesses: {counts} of {number_of(canaries, 'canary', 'canaries')}; "
            f"expected even numbers from 2 to {canaries}"
        )
    ordered = truth[np.argsort(values, kind="stable")]
    epsilon = max(
        _refuted(
            canaries,
            n,
            int(np.count_nonzero(ordered[-n // 2 :]) + np.count_nonzero(~ordered[: n // 2])),
            delta,
            error / len(counts),
        )
        for n in counts
    )
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, method="one_run")


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound of the probability that so many guesses, or more, are right of an (ε, δ)-private run.

    β + 2 m δ max_i (Pr[correct > W >= correct - i] / i) with W ~ Binomial(guesses,
    1 / (1 + exp(-ε))) and β = Pr[W >= correct].

    Raises:
        FedsimError: not 0 <= correct <= guesses <= canaries, ε < 0, or δ not in [0, 1].

    >>> round(one_run_p_value(100, 100, 75, epsilon=1.0, delta=0.0), 3)
    0.383
    """
    from scipy.special import expit
    from scipy.stats import binom

    if not 0 <= correct <= guesses <= canaries:
        raise FedsimError(
            f"{correct} right of {number_of(guesses, 'guess', 'guesses')} of "
            f"{number_of(canaries, 'canary', 'canaries')}: expected 0 <= correct <= guesses <= "
            "canaries"
        )
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise FedsimError(f"epsilon {epsilon} and delta {delta}: expected ε >= 0 and δ in [0, 1]")
    rate = float(expit(epsilon))
    beta = float(binom.sf(correct - 1, guesses, rate))
    if correct == 0 or delta == 0:
        return min(1.0, beta)
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, rate))
    return min(1.0, beta + 2 * canaries * delta * float(np.max(below / steps)))


def _counts(canaries: int) -> list[int]:
    """m, m / 2, m / 4, m / 8 guesses, even, at least 2."""
    if canaries < 2:
        raise FedsimError(f"canaries: expected at least 2, got {canaries}")
    return sorted({max(2, canaries // share // 2 * 2) for share in (1, 2, 4, 8)})


def _refuted(canaries: int, guesses: int, correct: int, delta: float, error: float) -> float:
    """The largest ε whose p-value is below `error`; 0 if there is none."""

    def p_value(epsilon: float) -> float:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta)

    low, high = 0.0, _HIGHEST
    if p_value(low) >= error:
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < error else (low, middle)
    return low
