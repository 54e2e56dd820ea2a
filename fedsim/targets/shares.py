"""Scores shares: of classes in an update's batches, of classes and columns in clients' data."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim.contracts.metric import Metric, ScoringError, ordered
from fedsim.contracts.target import Aids, GuessRequest, HeldExamples, Resources, Target, TargetGuess
from fedsim.types import Truth


def class_share_error(claimed: Tensor, truth: Tensor) -> float:
    """Returns the total variation distance of two distributions over classes, in [0, 1].

    `claimed` (K,) and `truth` (L,) have classes 0 to K - 1 and L - 1, on the CPU; others have 0.
    """
    size = max(len(claimed), len(truth))
    padded = [
        torch.cat([each.double(), torch.zeros(size - len(each))]) for each in (claimed, truth)
    ]
    return float((padded[0] - padded[1]).abs().sum() / 2)


def _shares_of(labels: Tensor, classes: int = 0) -> Tensor:
    return torch.bincount(labels.cpu(), minlength=classes).double() / len(labels)


def _are_distributions(shares: Tensor) -> bool:
    """Whether shares (..., K) are non-negative and sum to 1, to 0.001."""
    # Shares in float32 sum to 1 up to rounding only.
    sums = shares.double().sum(-1)
    return bool((shares >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())


class _Shares(Target):
    """Shares of which those of public examples are the guess."""

    leaks: ClassVar[float] = 0.05
    works: ClassVar[float | None] = 0.1

    def prepare(self, resources: Resources) -> Any:
        guesser = resources.guesser
        return None if guesser is None else _shares_of(guesser.public_labels())


class ClassShares(_Shares):
    """Scores shares of classes in the batches behind one update, of all its clients together."""

    part: ClassVar[str] = "class_shares"
    """Name of answers (K,), the shares of classes 0 to K - 1."""
    noun: ClassVar[str] = "class shares"
    singular: ClassVar[str] = "class share"
    order: ClassVar[float] = 6.0
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

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the shares (K,) of classes 0 to the largest true label; None without labels."""
        labels = truth.tensors().get("labels")
        if labels is None or not len(labels):
            return None
        return _shares_of(labels)

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is (K,) shares >= 0 that sum to 1 within 0.001."""
        if answer.ndim != 1 or not _are_distributions(answer):
            raise ScoringError("class_shares: expected a share of each class, (K,), that sum to 1")

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the score of public data's shares, or equal ones; None if none were answered.

        The error is missing where the true labels are not recorded.
        """
        answer = None if request.found is None else self.answer_of(request.found)
        if answer is None:
            return None
        public = aids.get(self.part)
        guessed = torch.full((len(answer),), 1 / len(answer)) if public is None else public
        return TargetGuess(metrics=self.compare(guessed, request.truth, aids).means())


def client_class_error(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns the total variation distance (n,), in [0, 1], of clients' shares (n, K) to true."""
    return (claimed.double() - truth.double()).abs().sum(1) / 2


def client_column_error(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns the mean absolute difference (n,) of clients' entries (n, D) from the true ones.

    Negative claims, which answer nothing, are left out; a client with no other has NaN.
    """
    answered = claimed >= 0
    return ((claimed.double() - truth.double()).abs() * answered).sum(1) / answered.sum(1)


class _ClientMeans(_Shares):
    """Means over all examples of each client that took part, in the order of the clients."""

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        answer = None if request.found is None else self.answer_of(request.found)
        public, true = aids.get(self.part), self.truth_of(request.truth)
        if answer is None or public is None or true is None or answer.shape != true.shape:
            return None
        means = torch.zeros(true.shape[1], dtype=torch.float64)
        means[: len(public)] = public
        guessed = torch.where(answer < 0, answer.double(), means.expand(true.shape))
        found = self.compare(guessed, request.truth, aids)
        return TargetGuess(metrics=found.means(), per_image=found.per_image())


class ClientClassShares(_ClientMeans):
    """Scores shares of classes among all examples of each client of an update."""

    part: ClassVar[str] = "client_class_shares"
    """Name of answers and truth, (n, K): n clients by ascending number, K classes."""
    noun: ClassVar[str] = "clients’ class shares"
    singular: ClassVar[str] = "client’s class share"
    order: ClassVar[float] = 6.1
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="client_class_error",
            compute=ordered(client_class_error),
            unit="share",
            larger_leaks=False,
            heading="client mix",
            meaning="share of all that a client holds whose class would have to change for the "
            "answered shares of classes to be right",
        ),
    )

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is (n, K) as the truth, >= 0, and rows sum to 1."""
        super().check(answer, truth)
        # Zeros would else be nearer to uneven clients than any answer that knows nothing.
        if not _are_distributions(answer):
            raise ScoringError(
                "client_class_shares: expected shares of the classes of each client, that sum to 1"
            )

    def leave(self, batch: Truth, held: HeldExamples) -> Tensor | None:
        """Returns the shares (1, K) of classes in all that a client holds; None without classes."""
        if "labels" not in batch.tensors() or not held.classes:
            return None
        return _shares_of(held.labels, held.classes)[None]


class ClientColumnShares(_ClientMeans):
    """Scores shares of categories, or means of quantities, in columns of clients' tables."""

    part: ClassVar[str] = "client_column_shares"
    """Name of answers and truth, (n, D) on [0, 1]: n clients, D entries; below 0: no answer."""
    noun: ClassVar[str] = "clients’ column shares"
    singular: ClassVar[str] = "client’s column share"
    order: ClassVar[float] = 6.2
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="client_column_error",
            compute=ordered(client_column_error),
            unit="share",
            larger_leaks=False,
            heading="client columns",
            meaning="distance of an answered share of a category among a client’s rows, or of a "
            "quantity’s mean over its range, from the true one",
        ),
    )

    def prepare(self, resources: Resources) -> Any:
        """Returns the mean (D,) of public rows; None without public data, or if it is images."""
        rows = None if resources.guesser is None else resources.guesser.public()
        return None if rows is None or rows.ndim != 2 else rows.double().mean(0)

    def leave(self, batch: Truth, held: HeldExamples) -> Tensor | None:
        """Returns the mean (1, D) of all rows that a client holds; None without a table."""
        # Only a network's batch of a table has columns; pixels of images would take memory.
        if "columns" not in batch.tensors():
            return None
        return held()[0].double().mean(0)[None]

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is finite, (n, D), with an entry >= 0 per row."""
        super().check(answer, truth)
        if bool((answer < 0).all(1).any()):
            raise ScoringError("client_column_shares: no column is answered")
