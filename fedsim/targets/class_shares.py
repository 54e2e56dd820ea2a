"""Scores the share of each class in the batches that an update was computed from.

Those among all data of a client are `client_class_shares`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.contracts.metric import Metric, ScoringError, ordered
from fedsim.contracts.target import Aids, GuessRequest, Resources, Target, TargetGuess
from fedsim.types import Truth


def class_share_error(claimed: Tensor, truth: Tensor) -> float:
    """Returns the total variation distance of two distributions over classes, in [0, 1].

    `claimed` (K,) and `truth` (L,) are shares of the first classes, on the CPU; the shorter one
    lacks classes of share 0.
    """
    size = max(len(claimed), len(truth))
    padded = [
        torch.cat([each.double(), torch.zeros(size - len(each))]) for each in (claimed, truth)
    ]
    return float((padded[0] - padded[1]).abs().sum() / 2)


def shares_of(labels: Tensor, classes: int = 0) -> Tensor:
    """Returns the shares (K,) of the classes in `labels`, of at least `classes` classes."""
    return torch.bincount(labels.cpu(), minlength=classes).double() / len(labels)


def are_distributions(shares: Tensor) -> bool:
    """Whether shares (..., K) are non-negative and sum to 1, to 0.001."""
    # Shares in float32 sum to 1 up to rounding only.
    sums = shares.double().sum(-1)
    return bool((shares >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())


class ClassShares(Target):
    """Shares of the classes in the batches behind one update, of all its clients together."""

    part: ClassVar[str] = "class_shares"
    noun: ClassVar[str] = "class shares"
    singular: ClassVar[str] = "class share"
    order: ClassVar[float] = 6.0
    leaks: ClassVar[float] = 0.05
    works: ClassVar[float | None] = 0.1
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="class_share_error",
            compute=ordered(class_share_error),
            unit="share",
            larger_leaks=False,
            heading="class mix",
            meaning="share of the examples behind an update whose class would have to change for "
            "the answered shares of classes to be right",
        ),
    )

    def prepare(self, resources: Resources) -> Any:
        """Returns the shares (K,) of the classes of public examples; None where there are none."""
        guesser = resources.guesser
        return None if guesser is None else shares_of(guesser.public_labels())

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the shares (K,) of classes 0 to the largest true label; None without labels."""
        labels = truth.tensors().get("labels")
        if labels is None or not len(labels):
            return None
        return shares_of(labels)

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Refuses answers that are not (K,) shares that sum to 1, to 0.001."""
        if answer.ndim != 1 or not are_distributions(answer):
            raise ScoringError("class_shares: expected a share of each class, (K,), that sum to 1")

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the score of public, else of equal shares; None if no shares were answered."""
        answer = None if request.found is None else self.answer_of(request.found)
        if answer is None:
            return None
        public = aids.get(self.part)
        guessed = torch.full((len(answer),), 1 / len(answer)) if public is None else public
        return TargetGuess(metrics=self.compare(guessed, request.truth, aids).means())
