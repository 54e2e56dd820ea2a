"""Lower bounds of ε from what an attacker makes of releases under two neighbouring worlds.

Each world is a sample of scores, the higher the likelier that the row, example or client is
present. A bound fails with at most the probability 1 - confidence, whatever the scores' law: the
threshold is fixed on one half of each sample and only the other half is counted (Jagielski, Ullman
and Oprea, Auditing Differentially Private Machine Learning, NeurIPS 2020; Nasr et al., Tight
Auditing of Differentially Private Machine Learning, USENIX Security 2023).

In one run with many canaries each is included by a fair coin of its own. An attacker guesses coins,
and of an (ε, δ)-private run hardly more than a share of 1 / (1 + exp(-ε)) of the guesses can be
right (Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023,
Theorem 5.2; algorithm of Appendix D). Contributions of canaries need not be independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import Array
from fedsim.types import FedsimError
from fedsim.words import number_of

BoundMethod = Literal["threshold", "gaussian_dp", "one_run"]

LEAST_DRAWS = 100
"""Scores of each world that a bound needs; with fewer, hardly anything can be bounded."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """States that a release is not (ε', δ)-private for any ε' < ε, with a certain confidence."""

    epsilon: float
    """ε, at least 0; a bound of 0 says nothing."""
    delta: float
    confidence: float
    """Least probability, in (0, 1), with which the statement is right."""
    method: BoundMethod
    """Function that found it: `threshold_bound`, `one_run_bound`, or, as `gaussian_dp`,
    `gaussian_bound`, whose bound holds only where the trade-off curve is a Gaussian one."""


def threshold_bound(
    absent: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.99
) -> LowerBound:
    """Computes a lower bound of ε at δ from an attacker's scores in two neighbouring worlds.

    A score is the higher, the likelier the row is there. Nothing is presumed of the release. A
    threshold for each tail is fixed on the first half of each sample and counted on the second.

    Args:
        absent: (n,) scores of independent releases without the row; infinite ones are allowed.
        present: (m,) scores of releases with it.
        delta: in (0, 1).
        confidence: probability, in (0, 1), with which the bound holds.

    Raises:
        FedsimError: an argument is out of its range, a score is NaN, or a world has fewer than 100
            scores (`LEAST_DRAWS`).

    >>> rng = np.random.default_rng(0)
    >>> absent, present = rng.normal(0, 1, 10**5), rng.normal(2, 1, 10**5)
    >>> round(threshold_bound(absent, present, delta=1e-3).epsilon, 1)  # the truth is 7.6
    4.8
    """
    # (ε, δ)-privacy says P(S) <= exp(ε) Q(S) + δ of every set S, for P and Q the laws of the two
    # worlds in either order. S is a tail of the scores; Clopper-Pearson bounds P(S) from below and
    # Q(S) from above. The four bounds of both directions share 1 - confidence.
    error = error_probability(delta, confidence) / 4
    fitted, counted = zip(*map(_halves, _worlds(absent, present)), strict=True)
    epsilon = 0.0
    # Present over absent in the upper tail; negated scores make it absent over present.
    for sign, likelier, other in ((1, 1, 0), (-1, 0, 1)):
        at = _choose_threshold(sign * fitted[likelier], sign * fitted[other], delta, error)
        low = _lower_end(*_tail(sign * counted[likelier], at), error)
        high = _upper_end(*_tail(sign * counted[other], at), error)
        epsilon = max(epsilon, float(_ratio(low, high, delta)[0]))
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, method="threshold")


def two_world_bounds(
    absent: ArrayLike, present: ArrayLike, *, delta: float, confidence: float, gaussian: bool
) -> list[LowerBound]:
    """Computes [`threshold_bound`], or [`threshold_bound`, `gaussian_bound`] of a claim of μ-GDP.

    All hold at once with the given `confidence`; the field `confidence` of each of two is larger,
    as each has half of the error probability. Errors are those of `threshold_bound`.

    Args:
        absent: (n,) scores of independent releases without the row.
        present: (m,) scores of releases with it.
        delta: in (0, 1).
        confidence: probability, in (0, 1), with which all bounds hold.
        gaussian: whether the claim is one of μ-GDP.
    """
    methods = [threshold_bound, gaussian_bound] if gaussian else [threshold_bound]
    # By the union bound: each method errs with its share, so that the best of them may be taken.
    each = 1 - (1 - confidence) / len(methods)
    return [bound(absent, present, delta=delta, confidence=each) for bound in methods]


def gaussian_bound(
    absent: ArrayLike, present: ArrayLike, *, delta: float, confidence: float = 0.99
) -> LowerBound:
    """Computes a lower bound of ε at δ for a release whose trade-off curve is a Gaussian one.

    A test with false positive rate α and false negative rate β shows that the release is not μ-GDP
    for μ < Φ⁻¹(1 - α) - Φ⁻¹(β) (Dong, Roth and Su, Gaussian Differential Privacy, JRSS-B 2022,
    Definition 2.6). The ε that follows at δ is a bound only where the curve is Gaussian. Elsewhere
    that ε refutes a claim of μ-GDP, never one of (ε, δ). The bound is far tighter than
    `threshold_bound`, whose errors it has, where δ is small: no rare event has to be counted.

    Args:
        absent: (n,) scores of independent releases without the row.
        present: (m,) scores of releases with it.
        delta: in (0, 1).
        confidence: probability, in (0, 1), with which the bound holds.
    """
    error = error_probability(delta, confidence) / 2
    mu = mu_bound(absent, present, error=error)
    epsilon = float(gaussian.epsilon(1 / mu, delta)) if mu > 0 else 0.0
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, method="gaussian_dp")


def mu_bound(absent: ArrayLike, present: ArrayLike, *, error: float) -> float:
    """Computes the μ >= 0 below which the scores refute every claim of μ-GDP; 0 if none is refuted.

    Scores, and errors, are those of `threshold_bound`. The result is wrong with a probability of at
    most twice `error`, in (0, 1).
    """
    from scipy.special import ndtri

    fitted, counted = zip(*map(_halves, _worlds(absent, present)), strict=True)

    def mu(at: Array, worlds: tuple[Array, ...]) -> Array:
        positives, n = _tail(worlds[0], at)
        detected, m = _tail(worlds[1], at)
        return np.asarray(
            ndtri(1 - _upper_end(positives, n, error)) - ndtri(_upper_end(m - detected, m, error))
        )

    # Chosen on one half and counted on the other, so that the choice costs no confidence.
    candidates = _candidates(*fitted)
    best = candidates[int(np.argmax(mu(candidates, fitted)))]
    return max(0.0, float(mu(np.asarray([best]), counted)[0]))


def _lower_end(successes: ArrayLike, trials: int, error: float) -> Array:
    """Computes Clopper and Pearson's lower bound of a probability, wrong with chance `error`."""
    from scipy.special import betaincinv

    counts = np.asarray(successes, dtype=np.int64)
    # The quantile of Beta(k, n - k + 1), which is not defined for k = 0; there the bound is 0.
    bound = betaincinv(np.maximum(counts, 1), trials - counts + 1, error)
    return np.where(counts == 0, 0.0, bound)


def _upper_end(successes: ArrayLike, trials: int, error: float) -> Array:
    """Computes Clopper and Pearson's upper bound of a probability, wrong with chance `error`."""
    return 1 - _lower_end(trials - np.asarray(successes), trials, error)


def _ratio(low: Array, high: Array, delta: float) -> Array:
    """Computes ln((low - δ) / high), -inf where nothing is left of `low`."""
    left = low - delta
    return np.where(left > 0, np.log(np.maximum(left, np.finfo(float).tiny) / high), -math.inf)


def _choose_threshold(likelier: Array, other: Array, delta: float, error: float) -> Array:
    candidates = _candidates(other, likelier)
    low = _lower_end(*_tail(likelier, candidates), error)
    high = _upper_end(*_tail(other, candidates), error)
    return candidates[[int(np.argmax(_ratio(low, high, delta)))]]


def _candidates(*worlds: Array) -> Array:
    """Chooses scores to try as thresholds: every world's ranks, dense towards both tails."""
    chosen = []
    for scores in worlds:
        ordered = np.sort(scores)
        # The best threshold may lie far out in a tail, where ranks are tried one by one.
        ranks = np.unique(np.geomspace(1, len(ordered), 400).astype(np.int64)) - 1
        chosen += [ordered[ranks], ordered[::-1][ranks]]
    return np.unique(np.concatenate(chosen))


def _tail(scores: Array, thresholds: Array) -> tuple[NDArray[np.int64], int]:
    reached = len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")
    return reached.astype(np.int64), len(scores)


def _halves(scores: Array) -> tuple[Array, Array]:
    return scores[: len(scores) // 2], scores[len(scores) // 2 :]


def _worlds(absent: ArrayLike, present: ArrayLike) -> tuple[Array, Array]:
    worlds = np.asarray(absent, dtype=np.float64), np.asarray(present, dtype=np.float64)
    for name, scores in zip(("absent", "present"), worlds, strict=True):
        if scores.ndim != 1:
            raise FedsimError(
                f"{name}: scores of shape {scores.shape}; expected one axis, (draws,)"
            )
        if len(scores) < LEAST_DRAWS:
            raise FedsimError(
                f"{name}: {len(scores)} scores are too few for a bound; draw {LEAST_DRAWS} or more"
            )
        if np.isnan(scores).any():
            raise FedsimError(f"{name}: a score is NaN; the score has to order every release")
    return worlds


def error_probability(delta: float, confidence: float) -> float:
    """Returns 1 - confidence; a FedsimError if it or `delta` is not above 0 and below 1."""
    if not 0 < delta < 1:
        raise FedsimError(f"delta: {delta} is not a probability above 0 and below 1")
    if not 0 < confidence < 1:
        raise FedsimError(f"confidence: {confidence} is not a probability above 0 and below 1")
    return 1 - confidence


_HIGHEST = 64.0
"""The largest ε searched: beyond it a guess may always be right, in double precision."""


def one_run_bound(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.99,
    guesses: Sequence[int] | None = None,
) -> LowerBound:
    """Computes a lower bound of ε at δ from the canaries of one run: the largest that they refute.

    It is 0 if they refute none, and never above 64. Source: Steinke, Nasr and Jagielski, Privacy
    Auditing with One (1) Training Run, NeurIPS 2023.

    Args:
        scores: (m,) scores; the higher, the likelier a canary is included.
        included: (m,) bool, whether each canary was included, by a fair coin of its own.
        delta: in (0, 1).
        confidence: probability, in (0, 1), with which the bound holds.
        guesses: even numbers of canaries to guess, the highest half of them as included and the
            lowest as left out. They must not depend on the coins; None: about m, m / 2, m / 4 and
            m / 8.

    Raises:
        FedsimError: an argument is out of range, shapes differ, a score is NaN, or there are fewer
            than 2 canaries.

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
    if canaries < 2 and guesses is None:
        raise FedsimError(f"canaries: expected at least 2, got {canaries}")
    shares = {max(2, canaries // share // 2 * 2) for share in (1, 2, 4, 8)}
    counts = sorted(shares) if guesses is None else list(guesses)
    if not counts or not all(0 < n <= canaries and n % 2 == 0 for n in counts):
        raise FedsimError(
            f"guesses: {counts} of {number_of(canaries, 'canary', 'canaries')}; "
            f"expected even numbers from 2 to {canaries}"
        )
    # A stable sort breaks ties by position, and so never by the coins.
    ordered = truth[np.argsort(values, kind="stable")]
    epsilon = max(
        _largest_refuted(
            canaries,
            n,
            int(np.count_nonzero(ordered[-n // 2 :]) + np.count_nonzero(~ordered[: n // 2])),
            delta,
            error / len(counts),
        )
        for n in counts
    )
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, method="one_run")


def _one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bounds the probability that an (ε, δ)-private run has `correct` right guesses or more."""
    # The bound is β + 2 m δ max_i (Pr[correct > W >= correct - i] / i) of m canaries, with W ~
    # Binomial(guesses, 1 / (1 + exp(-ε))) and β = Pr[W >= correct].
    from scipy.special import expit
    from scipy.stats import binom

    rate = float(expit(epsilon))
    # SciPy's sf(x) is Pr[W > x].
    beta = float(binom.sf(correct - 1, guesses, rate))
    if correct == 0 or delta == 0:
        return min(1.0, beta)
    steps = np.arange(1, correct + 1)
    # Pr[correct > W >= correct - i] for i from 1 to `correct`, as one running sum.
    below = np.cumsum(binom.pmf(correct - steps, guesses, rate))
    return min(1.0, beta + 2 * canaries * delta * float(np.max(below / steps)))


def _largest_refuted(
    canaries: int, guesses: int, correct: int, delta: float, error: float
) -> float:
    """Returns the largest ε whose p-value is below `error`; 0 if there is none."""

    def p_value(epsilon: float) -> float:
        return _one_run_p_value(canaries, guesses, correct, epsilon, delta)

    low, high = 0.0, _HIGHEST
    if p_value(low) >= error:
        return low
    # The p-value rises with ε. `low` is refuted at every turn, and is what may be stated.
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < error else (low, middle)
    return low
