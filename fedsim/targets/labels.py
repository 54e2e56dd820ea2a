"""Scores labels: those of the batch that an update was computed from."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fedsim.contracts.metric import MISSING, Metric, ScoringError, Term, ordered
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.targets.images import answers_labels_alone, described_guess, guessed_batch
from fedsim.types import Truth


def _check_labels(labels: Tensor, what: str) -> None:
    """Refuses tensors that are not integers of shape (N,); `what` names them in the message."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ScoringError(
            f"{what}: expected integer labels of shape (N,), got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )


def _label_overlap(reconstruction: Tensor, truth: Tensor) -> float:
    """Returns the labels' multiset intersection over N true ones; the first N answers count."""
    claimed = reconstruction[: len(truth)].tolist()
    matches = 0
    for label in truth.tolist():
        if label in claimed:
            # Each claimed label serves once, as in an intersection of multisets.
            claimed.remove(label)
            matches += 1
    return matches / len(truth)


LABEL_ACCURACY = Metric(
    name="label_accuracy",
    compute=ordered(_label_overlap),
    unit="share",
    larger_leaks=True,
    heading="label",
    meaning="share of labels recovered, whatever image they came with",
    described=Term(
        key="labels",
        name="labels",
        meaning="Share of labels recovered: on the matched image, or as a multiset where an "
        "attack recovers labels alone. The guess names the most frequent one.",
    ),
    shown_as="percent",
    narrow="late",
)


class Labels(Target):
    """Scores a batch's labels, as a multiset."""

    part: ClassVar[str] = "labels"
    """Name of answers (M,), integers of which the first N count, and of the truth (N,) int64."""
    noun: ClassVar[str] = "labels"
    singular: ClassVar[str] = "label"
    order: ClassVar[float] = 2.0
    itemwise: ClassVar[bool] = True
    keeps_truth: ClassVar[bool] = True
    ranks_by: ClassVar[Any] = "gain"
    leaks: ClassVar[float] = 0.1
    metrics: ClassVar[tuple[Metric, ...]] = (LABEL_ACCURACY,)

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is integers of shape (M,)."""
        _check_labels(answer, "reconstruction")

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores a checked answer by `label_accuracy`: the share of N true labels recovered.

        A truth whose labels are no integers (N,) is a ScoringError, one without any a KeyError.
        """
        _check_labels(truth.tensors()["labels"], "truth")
        return super().compare(answer, truth, aids)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the scored guess of a batch's labels; None without public data or true labels."""
        guess = guessed_batch(request, aids)
        if guess is None:
            return None
        alone = answers_labels_alone(request.found)
        return TargetGuess(
            name="labels" if alone else None,
            metrics=self.compare(guess.labels, request.truth, aids).means(),
            learned=described_guess(guess, request, aids) if alone else {},
        )

    def filling(self, true: Tensor, aids: Aids) -> Tensor:
        """Returns -1, 0-d, which stands for a missing label; `true` (N,) gives its type."""
        return true.new_tensor(MISSING)
