"""Defines what a metric is: how it is computed, measured, compared and shown.

A target (`fedsim.contracts.target`) has metrics. Rows, leaderboard and report know each by its
name, and read all else from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedsim.types import FedsimError


class ScoringError(FedsimError):
    """A reconstruction cannot be scored: the trial fails, and its row states this reason."""


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
    """Holds an answer beside the truth, as the functions of metrics get them."""

    claimed: Tensor
    """(N, ...) answer in the order of the truth, where it was matched."""
    truth: Tensor
    """(N, ...) truth."""
    unordered: Tensor | None = None
    """(M, ...) as the attack returned it; None if that had the order of the truth."""
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
    """Describes a metric for everything that computes, compares or shows its values.

    `compute` returns a tensor (N,) with a value for each truth, a float for all of them, or an
    `Unavailable` with the reason why there is none. `shown_as` is the form of a table's cell: the
    mean, the mean with its interval, or the mean in percent.
    """

    name: str
    """Name of its field in results.jsonl."""
    compute: Callable[[ScoredPair], MetricValue]
    unit: Literal["dB", "degrees", "range", "share", "relative", "none"]
    """`range`: pixels or entries scaled to [0, 1]. `relative`: in units of the truth's length."""
    larger_leaks: bool
    """Whether a larger value is a larger leak."""
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
    digits: int = 2
    """Number of decimals."""
    narrow: Literal["kept", "late", "early"] = "early"
    """Order in which a table that is too wide leaves columns out: never, late, or early."""

    @property
    def term(self) -> Term:
        """Entry of the glossary that explains the metric's column."""
        if self.described:
            return self.described
        # The key is the term's anchor in a page.
        key = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        meaning = self.meaning[:1].upper() + self.meaning[1:]
        return Term(key=key, name=self.heading or self.name, meaning=f"{meaning}.")

    def gain(self, value: float, over: float) -> float:
        """Returns by how much `value` leaks more than `over`, in the metric's unit.

        A negative gain means that it leaks less.
        """
        return value - over if self.larger_leaks else over - value


def ordered(
    function: TensorMetric,
) -> Callable[[ScoredPair], MetricValue]:
    """Adapts a function of (claimed, truth) to the signature of `Metric.compute`."""
    return lambda pair: function(pair.claimed, pair.truth)
