"""Defines what a metric is: how answers are paired, compared, measured and shown, and guessed.

All metrics of images use one assignment of least cost: by its own best match, or with one
reconstruction for several truths, a single good guess would count as many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedsim.types import FedsimError


class ScoringError(FedsimError):
    """Raised if a reconstruction cannot be scored; the row of the failed trial has the message."""


@dataclass(frozen=True)
class Unavailable:
    """States why a metric has no value here."""

    reason: str


MetricValue = Tensor | float | Unavailable
"""Value of a metric: one for each truth (N,), one for all of them, or why there is none."""

TensorMetric = Callable[[Tensor, Tensor], MetricValue]
"""Function that compares a claim (N, ...) with the truth (N, ...)."""


@dataclass(frozen=True, kw_only=True)
class ScoredPair:
    """Holds an answer beside the truth, as `Metric.compute` gets them."""

    claimed: Tensor
    """(N, ...) answer in the order of the truth, where it was matched."""
    truth: Tensor
    """(N, ...) what clients really used, on the CPU as all is here."""
    unordered: Tensor | None = None
    """(M, ...) answer in the attack's order, if a metric needs that; None: `claimed` serves."""
    aid: Any = None
    """What the target prepared for scores; None if nothing."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """Holds a term of the glossary, and its meaning in plain sentences."""

    key: str
    """Identifier of the term in a page: lower-case letters and hyphens."""
    name: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Describes a metric for everything that computes, compares or shows its values."""

    name: str
    """Name of its field in results.jsonl."""
    compute: Callable[[ScoredPair], MetricValue]
    unit: Literal["dB", "degrees", "range", "share", "relative", "none"]
    """`range`: pixels or entries scaled to [0, 1]. `relative`: in units of the truth's length."""
    larger_leaks: bool
    """Whether a larger value leaks more; else a smaller one does."""
    uninformed: float | None = None
    """Value of an answer without any knowledge, for all data: features of zero, a coin. None if it
    depends on the data; then the guess is scored."""
    heading: str | None = None
    """Heading of its column in a leaderboard; None if only JSON and CSV show it."""
    meaning: str = ""
    """Explanation of the column in a clause, for readers of a table."""
    described: Term | None = None
    """Entry of the glossary, if it says more than `heading` and `meaning` do."""
    shown_as: Literal["mean", "interval", "percent"] = "mean"
    """Form of a table's cell: the mean, the mean with its interval, or the mean in percent."""
    digits: int = 2
    """Number of decimals of a table's cell."""
    narrow: Literal["kept", "late", "early"] = "early"
    """Order in which a table that is too wide leaves columns out: never, late, or early."""

    @property
    def term(self) -> Term:
        """Glossary entry of the metric: `described`, or one of heading (else name) and meaning."""
        if self.described:
            return self.described
        key = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        meaning = self.meaning[:1].upper() + self.meaning[1:]
        return Term(key=key, name=self.heading or self.name, meaning=f"{meaning}.")

    def gain(self, value: float, over: float) -> float:
        """Returns by how much `value` leaks more than `over`, in the metric's unit; < 0: less."""
        return value - over if self.larger_leaks else over - value


def ordered(function: TensorMetric) -> Callable[[ScoredPair], MetricValue]:
    """Adapts a function of (claimed, truth), each (N, ...), to be a `Metric.compute`."""
    return lambda pair: function(pair.claimed, pair.truth)


MOST_CANDIDATES = 1024


@dataclass(frozen=True, kw_only=True)
class GuessChances:
    """Bounds how likely a guess that saw no update reaches each level of a score."""

    levels: tuple[float, ...]
    """Values of the score, ascending, both ends of its range included."""
    chances: tuple[float, ...]
    """Upper bound on the probability of a single answer to reach each of `levels`. The truth is one
    of the candidates, each as likely."""
    candidates: int
    """Number of public images that the truth may be."""
    answers: int = 1
    """Number of answers of which the best counts."""


def bound_chances(
    distances: Tensor, radii: Sequence[float], groups: Tensor | None = None
) -> tuple[float, ...]:
    """Returns for each of `radii` an upper bound on the chance of an answer so near to the truth.

    The truth is drawn uniformly from N >= 1 candidates of these (N, N) `distances`, which obey the
    triangle inequality and have the unit of `radii`. `groups` (N,) is what the attacker knows of
    each candidate, such as its label; None: nothing.
    """
    count = len(distances)
    groups = torch.zeros(count, dtype=torch.int64) if groups is None else groups
    own = [distances[groups == group][:, groups == group] for group in sorted(set(groups.tolist()))]
    # Candidates within r of one answer are within 2 r of each other. So no answer has more of them
    # near than some candidate has within 2 r. The tolerance counts it itself at a radius of 0.
    return tuple(
        sum(int((each <= 2 * radius + 1e-9).sum(1).max()) for each in own) / count
        for radius in radii
    )


MISSING = -1
"""Marks a truth without a reconstruction in an assignment."""


def match(reconstruction: Tensor, truth: Tensor) -> list[int]:
    """Assigns reconstructions (M, ...) to truths (N, ...) so that the total squared error is least.

    Returns N indices: entry i is the reconstruction that is scored against truth i. Both are
    finite, on the CPU, and need no gradient. If M > N, only the first N reconstructions count, as
    choosing among guesses by the truth would be an oracle. If M < N, N - M truths are left
    `MISSING` (-1). Source: Kuhn, The Hungarian method for the assignment problem, Naval Research
    Logistics Quarterly 2, 1955.
    """
    claimed = reconstruction[: len(truth)].flatten(1).double()
    targets = truth.flatten(1).double()
    # The direct form of the distance: the matrix-product form loses small differences.
    distance = torch.cdist(targets, claimed, compute_mode="donot_use_mm_for_euclid_dist")
    # Images without pixels cost nothing, and must not divide by 0.
    cost = distance.square() / max(1, targets.shape[1])
    return assign(cost)


def assign(cost: Tensor) -> list[int]:
    """Returns for each row of `cost` (N, M), on the CPU, its own column at the least total cost.

    The N - M rows that are left over if N > M get `MISSING` (-1). `cost` is finite.
    """
    if cost.shape == (1, 1):  # without scipy, whose import takes half a second
        return [0]
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(cost.numpy())
    assignment = [MISSING] * len(cost)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        assignment[row] = column
    return assignment


def align(values: Tensor, assignment: list[int], fill: Tensor) -> Tensor:
    """Returns `values` (M, ...) in the order of N >= 1 truths: (N, ...), on the CPU.

    Entry k of `assignment` is the index of the value for truth k, or `MISSING` (-1) for `fill`
    (...).
    """
    values = values.detach().cpu()
    fill = fill.detach().cpu().to(values.dtype)
    return torch.stack([fill if k == MISSING else values[k] for k in assignment])
