"""Scores source: which client holds a given record that one of them trains on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.contracts.metric import Metric, MetricValue, ScoredPair, ScoringError, Term, Unavailable
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.scoring.statistics import share
from fedsim.types import SOURCE_CLASSES, SOURCE_CLIENTS, SOURCE_LABELS, Truth

_SHUFFLES = 999
"""Number of times that answers are dealt anew among records of their class."""


def _name_clients(scores: Tensor) -> Tensor:
    """Returns the clients (N, K) of the largest `scores`, as shares of one, which ties share."""
    named = (scores == scores.max(1, keepdim=True).values).double()
    return named / named.sum(1, keepdim=True)


def _shuffle_accuracies(named: Tensor, labels: Tensor, source: Tensor) -> Tensor:
    """Returns the accuracies (999,) of answers `named` that are dealt anew within each class."""
    # An answer that knows no more of a record than its class is as accurate as these, however the
    # answers depend on each other (R. A. Fisher, The Design of Experiments, 1935).
    stream = torch.Generator().manual_seed(0)
    # Ordering records by class and then by chance deals the answers of each class anew.
    drawn = torch.rand(_SHUFFLES, len(labels), generator=stream, dtype=torch.float64)
    dealt = (drawn + labels).argsort(1)
    home = labels.argsort(stable=True)
    return named[dealt, source[home]].mean(1)


def _class_rule_accuracy(labels: Tensor, source: Tensor, held: Tensor) -> float:
    """Returns the accuracy of naming the client that holds most other examples of the class."""
    return float(_name_clients(held.T)[labels, source].mean())


def _chance_accuracy(scores: Tensor, source: Tensor, labels: Tensor, held: Tensor) -> float:
    """Returns the accuracy of whoever knows no more of a record than its class."""
    # The largest, since a chance that is too low would call luck a leak.
    shuffled = _shuffle_accuracies(_name_clients(scores), labels, source)
    return max(
        1 / scores.shape[1], _class_rule_accuracy(labels, source, held), float(shuffled.mean())
    )


def _measure_source(
    scores: Tensor, source: Tensor, labels: Tensor, held: Tensor
) -> dict[str, float | Unavailable]:
    """Returns the metrics of scores (N, K), with clients and classes (N,), and `held` (K, C)."""
    # Ends of the accuracy are Clopper and Pearson's (1934), which take records for independent. The
    # p-value does not: it is the share of answers dealt anew within each class that are as
    # accurate. `held` counts other examples that each client holds of each class.
    if not len(source):
        reason = Unavailable("no record has a single client")
        return {metric.name: reason for metric in Source.metrics}
    named = _name_clients(scores)
    hits, count = float(named[torch.arange(len(source)), source].sum()), len(source)
    shuffled = _shuffle_accuracies(named, labels, source)
    chance = _chance_accuracy(scores, source, labels, held)
    # Answers that know only classes exceed this once in 40 times.
    likely = max(chance, float(shuffled.quantile(0.975)))
    accuracy, left = hits / count, 1 - chance
    own = scores.gather(1, source[:, None])
    # The middle of the ranks that equal scores share.
    ranks = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    found: dict[str, float | Unavailable] = {
        "source_accuracy": accuracy,
        # Ties share records, and an interval takes whole ones.
        "source_accuracy_low": share(math.floor(hits + 1e-9), count).low,
        "source_accuracy_high": share(math.ceil(hits - 1e-9), count).high,
        "source_rank": float(ranks.double().mean()),
        # The answer itself is one of the deals, which makes the test exact.
        "source_p_value": (1 + int((shuffled >= accuracy - 1e-12).sum())) / (1 + _SHUFFLES),
        "source_advantage": Unavailable("the classes of records name their clients by themselves"),
    }
    found["source_advantage_beyond_chance"] = found["source_advantage"]
    if left > 1e-9:
        found["source_advantage"] = (accuracy - chance) / left
        found["source_advantage_beyond_chance"] = max(0.0, accuracy - likely) / left
    return found


def _compute(name: str) -> Callable[[ScoredPair], MetricValue]:
    """Returns what computes one metric of scores and clients; classes, and numbers, are an aid."""
    return lambda pair: _measure_source(pair.claimed.double(), pair.truth, *pair.aid)[name]


_SOURCE = Term(
    key="source",
    name="Source",
    meaning="How well clients are named for known records. Accuracy: share of records whose client "
    "is named first. Chance: what the records' classes alone tell, or one over the number of "
    "clients. Advantage: the way from chance (0) to certainty (1).",
)


class Source(Target):
    """Scores which client holds each record, by a score of each client for it."""

    part: ClassVar[str] = "source"
    """Name of answers (N, K), for N records and K clients, and of the truth (N,): 0 to K - 1."""
    noun: ClassVar[str] = "sources"
    singular: ClassVar[str] = "source"
    order: ClassVar[float] = 5.0
    saved_beside: ClassVar[tuple[str, ...]] = (SOURCE_LABELS, SOURCE_CLASSES)
    ranks_by: ClassVar[Any] = "gain"
    leaks: ClassVar[float] = 0.05
    works: ClassVar[float | None] = 0.25
    of_all_clients: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="source_advantage",
            compute=_compute("source_advantage"),
            unit="share",
            larger_leaks=True,
            uninformed=0.0,
            heading="source advantage",
            meaning="way from chance to certainty in naming the client that holds a record",
            described=_SOURCE,
            shown_as="interval",
        ),
        Metric(
            name="source_accuracy",
            compute=_compute("source_accuracy"),
            unit="share",
            larger_leaks=True,
            heading="source",
            meaning="share of records whose client is named right",
            described=_SOURCE,
            shown_as="percent",
        ),
        *(
            Metric(name=name, compute=_compute(name), unit="share", larger_leaks=True)
            for name in (
                "source_accuracy_low",
                "source_accuracy_high",
                "source_advantage_beyond_chance",
            )
        ),
        *(
            Metric(name=name, compute=_compute(name), unit="none", larger_leaks=False)
            for name in ("source_rank", "source_p_value")
        ),
    )

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is finite scores (N, K) of records and clients."""
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("clients of records were named, and the truth has no records")
        clients = truth.tensors().get(SOURCE_CLIENTS)
        # Saved truths are without the clients' numbers, and their answers were checked before.
        shape = (len(true), answer.shape[-1] if clients is None else len(clients))
        if answer.shape != shape or not bool(answer.isfinite().all()):
            raise ScoringError(
                f"source: expected finite scores of {shape[0]} records and {shape[1]} clients, got "
                f"{tuple(answer.shape)}"
            )

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores a checked answer: each record's client of highest score counts as named.

        All metrics are unavailable if no record has one client, or none were recorded.
        """
        known = self._read_known(truth)
        if known is None:
            return TargetScores(values=self.unavailable("the records were not recorded"))
        return TargetScores(values=_measure_source(answer.detach().cpu().double(), *known))

    def _read_known(self, truth: Truth) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns clients, classes and numbers of other examples; None if one is missing."""
        tensors = truth.tensors()
        if not {self.part, SOURCE_LABELS, SOURCE_CLASSES} <= set(tensors):
            return None
        return tensors[self.part].cpu(), tensors[SOURCE_LABELS].cpu(), tensors[SOURCE_CLASSES].cpu()

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the accuracy that records' classes alone give, at least 1 / K, and advantage 0.

        Other metrics are None, and these two as well without recorded records. None in place of a
        result says that the attack named no client.
        """
        answer = None if request.found is None else self.answer_of(request.found)
        if answer is None:
            return None
        values: dict[str, float | None] = dict.fromkeys(metric.name for metric in self.metrics)
        known = self._read_known(request.truth)
        if known is not None and len(known[0]):
            chance = _chance_accuracy(answer.detach().cpu().double(), *known)
            values |= {"source_advantage": 0.0, "source_accuracy": chance}
        return TargetGuess(metrics=values)

    def borrow(self, answer: Tensor, pairs: list[int], truth: Truth) -> Tensor:
        """Returns another watcher's scores for this one's N records, repeated if they are fewer.

        Clients are repeated, too, up to the largest true one. `pairs` is not read.
        """
        true = self.truth_of(truth)
        assert true is not None
        # Another run may have fewer clients, and no true client may lie beyond the scores.
        clients = max(answer.shape[1], int(true.max()) + 1)
        records = torch.arange(len(true)) % len(answer)
        return answer[records][:, torch.arange(clients) % answer.shape[1]]
