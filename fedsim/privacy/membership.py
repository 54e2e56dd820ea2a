"""Bounds what a test for the presence of one row can achieve under (ε, δ).

(ε, δ)-privacy is a bound on every test: with x its false and y its true positive rate,
y <= e^ε x + δ, and as much with the worlds exchanged, 1 - x <= e^ε (1 - y) + δ (Wasserman and Zhou,
A Statistical Framework for Differential Privacy, JASA 2010, Theorem 2.4; Kairouz, Oh and Viswanath,
The Composition Theorem for Differential Privacy, ICML 2015, Theorem 2.1).
"""

from __future__ import annotations

import math

from fedsim.types import FedsimError


def tpr_limit(epsilon: float, delta: float, fpr: float) -> float:
    """Computes the largest true positive rate of a test under (ε, δ), at false positive rate `fpr`.

    An ε above 700 gives 1. A FedsimError refuses an ε that is negative or NaN, and a δ or `fpr`
    that is not in [0, 1].

    >>> tpr_limit(0.0, 0.0, 0.25), tpr_limit(math.inf, 0.0, 0.25)
    (0.25, 1.0)
    """
    _check(epsilon, delta, fpr)
    # The exponential overflows from 709 on; 1 is a limit that is never too low.
    if math.isinf(epsilon) or epsilon > 700:
        return 1.0
    # Both inequalities of the module's docstring, solved for y.
    one_way = math.exp(epsilon) * fpr + delta
    other = 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return min(1.0, one_way, other)


def certain_rate(accused: int, others: int, error: float = 0.025) -> float:
    """Returns a false positive rate that a threshold exceeds with probability `error` at most.

    The threshold is the `accused`-th highest of the scores of so many `others`: a FedsimError if
    `accused` is not from 1 to `others`. `error` is in (0, 1).

    >>> round(certain_rate(1, 999), 4)
    0.0037
    """
    from scipy.special import betaincinv

    if not 1 <= accused <= others:
        raise FedsimError(f"accused: expected 1 to {others}, got {accused}")
    # A further score's chance to lie above the threshold is an order statistic of uniform ones.
    return float(betaincinv(accused, others + 1 - accused, 1 - error))


def share_p_value(
    told: int, members: int, accused: int, others: int, epsilon: float, delta: float
) -> float:
    """Returns the p-value of a claim (ε, δ), given that a test finds `told` of `members`.

    The test takes whoever scores above a threshold, the `accused`-th highest score of `others` that
    took no part. The result is in [1e-12, 1]; at 1 nothing is refuted. Errors are those of
    `certain_rate` and `tpr_limit`.

    Args:
        told: number of members whose score is above the threshold.
        members: number of candidates that took part.
        accused: the threshold's place among the others, from 1.
        others: number of candidates that took no part.
        epsilon: at least 0.
        delta: in [0, 1].

    >>> round(share_p_value(5, 100, 1, 99, 1.0, 0.0), 2)
    0.55
    >>> share_p_value(80, 100, 1, 99, 1.0, 0.0) < 1e-6
    True
    """
    # Without δ, the claim is refuted at the level α if the lower end of Clopper and Pearson's
    # interval (1934) of the share told is above `tpr_limit` at `certain_rate`, each wrong with
    # probability α / 2 at most. The result is the least such α.
    # All candidates are of one run, in which δ may show many of them together. Of m candidates
    # 2 m δ at most are bounded by no ε on average (Steinke, Nasr and Jagielski, Privacy Auditing
    # with One (1) Training Run, NeurIPS 2023), so that more than i are with a chance of
    # 2 m δ / (i + 1) at most. For each i, that many are taken from those told and from the others,
    # and that chance is added. The result is the least of these.
    _check(epsilon, delta, 0.0)
    most = min(told, others - accused) if delta else 0
    # Powers of two are enough: the chance is at most twice that of any number between them.
    shown = [0, *(1 << power for power in range(most.bit_length()))]
    return min(
        1.0,
        *(
            2 * (members + others) * delta / (i + 1)
            + _pure_p_value(told - i, members, accused, others - i, epsilon)
            for i in shown
        ),
    )


def _pure_p_value(told: int, members: int, accused: int, others: int, epsilon: float) -> float:
    from scipy.special import betaincinv

    def is_refuted(level: float) -> bool:
        low = betaincinv(told, members - told + 1, level / 2) if told else 0.0
        return bool(low > tpr_limit(epsilon, 0.0, certain_rate(accused, others, level / 2)))

    if not is_refuted(1.0):
        return 1.0
    # Both ends widen as the level falls, so that one level separates what refutes from what does
    # not. Levels are halved in the exponent, since they range over many orders of magnitude.
    kept, refuted = math.log(_LEAST_LEVEL), 0.0
    for _ in range(50):
        middle = (kept + refuted) / 2
        kept, refuted = (kept, middle) if is_refuted(math.exp(middle)) else (middle, refuted)
    return math.exp(refuted)


_LEAST_LEVEL = 1e-12
"""Level below which p-values are not told apart: `certain_rate` has no more digits near 1."""


def row_claim(
    unit: str | None, relation: str | None, epsilon: float, delta: float, *, sampled: bool
) -> tuple[float, float] | None:
    """Returns the (ε, δ) that a claim implies for one example's presence; None if it implies none.

    The example's client takes part in either case. An ε above 350 may become (inf, 0), which limits
    nothing.

    Args:
        unit: what the claim hides, a `client` or an `example`; None if nothing is proven.
        relation: its neighbours, see `PrivacyClaim`; None if nothing is proven.
        epsilon: ε of the claim.
        delta: δ of the claim.
        sampled: whether an example's presence changes no other one's place in a batch.
    """
    # Whoever hides all of a client's data hides one example.
    if (unit, relation) in (("example", "add_or_remove"), ("client", "replace_one")):
        return epsilon, delta
    # Where a claim exchanges it for zero or for none, two such steps lead from one world to the
    # other (group privacy). One that exchanges a sampled example for zero leaves the client's
    # number of examples as it is, so that where the example is absent, another one is there. These
    # are two steps as well: one leaves, and the other comes.
    going = unit == "client" and relation in ("zero_out", "add_or_remove")
    if going or (unit == "example" and relation == "zero_out" and sampled):
        if epsilon > 350:  # no limit is left, and the exponential would overflow
            return math.inf, 0.0
        # Of two steps, ε adds up, and the first δ is enlarged by the second step's e^ε.
        return 2 * epsilon, min(1.0, (1 + math.exp(epsilon)) * delta)
    return None


def auc_limit(epsilon: float, delta: float) -> float:
    """Computes the largest area under a test's ROC curve: the area under `tpr_limit`.

    A FedsimError refuses an ε that is negative or NaN, and a δ that is not in [0, 1].

    >>> auc_limit(0.0, 0.0), auc_limit(math.inf, 0.0)
    (0.5, 1.0)
    """
    _check(epsilon, delta, 0.0)
    if math.isinf(epsilon) or epsilon > 700:
        return 1.0
    # The two lines meet where both error rates are (1 - δ) / (1 + e^ε); the area above the curve,
    # of which they are the sides, is symmetric about the diagonal through that point.
    ratio = math.exp(epsilon)
    meeting = (1 - delta) / (1 + ratio)
    return 1 - (1 - delta) * meeting


def _check(epsilon: float, delta: float, fpr: float) -> None:
    if not epsilon >= 0:
        raise FedsimError(
            f"epsilon: {epsilon} is no privacy parameter; give a number of at least 0"
        )
    for name, value in (("delta", delta), ("fpr", fpr)):
        if not 0 <= value <= 1:
            raise FedsimError(f"{name}: {value} is not a probability; give a number in [0, 1]")
