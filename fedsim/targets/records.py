"""Scores records: rows of a table, of the batch that an update was computed from."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedsim.contracts.metric import (
    MISSING,
    Metric,
    MetricValue,
    ScoredPair,
    ScoringError,
    Term,
    match,
    ordered,
)
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.targets.images import described_guess, guessed_batch
from fedsim.targets.rows import TOLERANCE
from fedsim.types import Truth


def columns_recovered(pair: ScoredPair) -> Tensor:
    """Returns the share of records whose value is right, for each of the C columns: (C,).

    `pair` has claimed and true records (N, D); its `aid` (D,) is the number of each entry's column.
    A quantity is right within 5 % of its range (`TOLERANCE`). A category is right if its entry is
    the largest of its column.
    """
    columns: Tensor = pair.aid
    shares = []
    for number in range(int(columns.max()) + 1):
        claimed, true = (part[:, columns == number] for part in (pair.claimed, pair.truth))
        # A quantity has one entry; a column of categories has one for each.
        if claimed.shape[1] == 1:
            right = ((claimed - true).abs() <= TOLERANCE).all(1)
        else:
            right = claimed.argmax(1) == true.argmax(1)
        shares.append(right.double().mean())
    return torch.stack(shares)


def record_error(claimed: Tensor, truth: Tensor) -> MetricValue:
    """Returns the mean absolute difference of entries (N, D) on [0, 1], by record: (N,)."""
    return (claimed.double() - truth.double()).abs().mean(1)


class Records(Target):
    """Records (rows of a table) of a batch, in any order."""

    part: ClassVar[str] = "records"
    noun: ClassVar[str] = "records"
    singular: ClassVar[str] = "record"
    order: ClassVar[float] = 0.5
    itemwise: ClassVar[bool] = True
    saved_beside: ClassVar[tuple[str, ...]] = ("columns",)
    keeps_truth: ClassVar[bool] = True
    leaks: ClassVar[float] = 0.1
    works: ClassVar[float | None] = 0.1
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="column_accuracy",
            compute=columns_recovered,
            unit="share",
            larger_leaks=True,
            heading="columns",
            meaning="share of the values of a batch of records that are recovered",
            described=Term(
                key="columns",
                name="columns",
                meaning="Share of the values of records that are recovered, column by column: "
                f"quantities within {TOLERANCE:.0%} of their range, categories exactly.",
            ),
            shown_as="interval",
            narrow="kept",
        ),
        Metric(
            name="record_error", compute=ordered(record_error), unit="range", larger_leaks=False
        ),
    )

    @property
    def truth_name(self) -> str:
        """Name of the tensor of the truth that has a batch's records, as it would have images."""
        return "images"

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the true records; None of a batch of images."""
        return super().truth_of(truth) if "columns" in truth.tensors() else None

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Refuses answers that are no records, or have entries beyond [0, 1]."""
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("records were answered, and the batch is of images")
        self.check_each(answer, true)
        # Both comparisons are false for NaN, which is refused as well.
        if not bool(((answer >= 0) & (answer <= 1)).all()):
            raise ScoringError("records: entries are beyond [0, 1], or not finite")

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Matches records by their mean squared error; those without an answer are missing."""
        true, columns = self.truth_of(truth), truth.tensors()["columns"]
        assert true is not None
        answer, true = answer.detach().cpu(), true.detach().cpu()
        assignment = match(answer, true)
        matched = [place for place, k in enumerate(assignment) if k != MISSING]
        # A record without an answer is missing: values in its place would be an invention.
        claimed = answer[[assignment[place] for place in matched]]
        pair = ScoredPair(claimed=claimed, truth=true[matched], aid=columns)
        missing = len(assignment) - len(matched)
        values = self.compute_metrics(pair)
        return TargetScores(values=values, assignment=assignment, missing=missing)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the scored guess, which is the mean of public rows."""
        guess = guessed_batch(request, aids)
        # A failed attack is compared with the guess, too.
        answered = request.found is None or self.answer_of(request.found) is not None
        if guess is None or not answered or self.truth_of(request.truth) is None:
            return None
        compared = self.compare(guess.images, request.truth, aids)
        return TargetGuess(
            name=guess.name,
            metrics=compared.means(),
            per_image=compared.per_image(),
            learned=described_guess(guess, request, aids),
        )

    def filling(self, true: Tensor, aids: Aids) -> Tensor:
        """Returns a record of NaN for a missing answer, which no reader takes for values."""
        return torch.full_like(true[0], torch.nan)
