"""Scores rows of a table: of a closed-form release, asked for one by one, or of a batch (records).

Entries of a release are in [-1, 1], each column's declared range, and those of records in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import (
    MISSING,
    Metric,
    MetricValue,
    ScoredPair,
    ScoringError,
    TensorMetric,
    Term,
    Unavailable,
    match,
    ordered,
)
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.scoring import image
from fedsim.targets.images import PSNR, RECOGNIZABLE_PSNR, RMSE, described_guess, guessed_batch
from fedsim.targets.labels import LABEL_ACCURACY
from fedsim.types import Payload, Reconstruction, ReleaseKind, Tensors, Truth

TOLERANCE = 0.05
"""Share of a column's range within which every entry of a recovered row is."""
_SLACK = 1e-6
"""Distance beyond [-1, 1] that is granted to a row's entries for rounding."""


def _row_error(claimed: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns |claimed - true|² / |true|² of each row (N, d): (N,), unless a true one is zero."""
    length = truth.square().sum(1)
    if not bool(length.all()):
        return Unavailable("a true row is zero, so there is no relative error")
    return (claimed - truth).square().sum(1) / length


def _row_cosine(claimed: Tensor, truth: Tensor) -> Tensor:
    return F.cosine_similarity(claimed, truth, dim=1, eps=1e-30)


def _is_recovered(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 for each row (N, d) with all entries right within 5 % of [-1, 1], else 0: (N,)."""
    # Twice, since entries range over [-1, 1], which is 2 long.
    return ((claimed - truth).abs().amax(1) <= 2 * TOLERANCE).double()


def _right_class(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 for each row (N, classes) with the largest entry at the true class, or 0: (N,)."""
    return (claimed.argmax(1) == truth.argmax(1)).double()


def _as_pixels(function: TensorMetric) -> Callable[[ScoredPair], MetricValue]:
    """Scales entries of rows from [-1, 1] to [0, 1], so that a decibel means the same."""
    return lambda pair: function((pair.claimed + 1) / 2, (pair.truth + 1) / 2)


_ROWS = Term(
    key="rows",
    name="row err, recovered",
    meaning="Of tables: squared error over squared length of a row, and the share of rows with "
    "every entry near the true one. The guess is the mean of the other rows.",
)


class Rows(Target):
    """Scores rows of a table that took part in a release."""

    part: ClassVar[str] = "rows"
    """Name of answers: entries as in `RowTruth.rows`, in [-1, 1], in the order of the true rows."""
    noun: ClassVar[str] = "rows"
    singular: ClassVar[str] = "row"
    order: ClassVar[float] = 3.0
    payloads: ClassVar[tuple[Payload, ...]] = get_args(ReleaseKind)
    asked_singly: ClassVar[bool] = True
    leaks: ClassVar[float] = 3.0
    exposes: ClassVar[float | None] = 10.0
    recognizable_from: ClassVar[float | None] = RECOGNIZABLE_PSNR
    metrics: ClassVar[tuple[Metric, ...]] = (
        # The same metric by name, so that a row of results has one field for it.
        replace(PSNR, compute=_as_pixels(image.psnr)),
        replace(RMSE, compute=_as_pixels(image.rmse)),
        Metric(
            name="row_error",
            compute=ordered(_row_error),
            unit="relative",
            larger_leaks=False,
            heading="row err",
            meaning="squared error over squared length",
            described=_ROWS,
            digits=3,
            narrow="late",
        ),
        Metric(name="row_cosine", compute=ordered(_row_cosine), unit="none", larger_leaks=True),
        Metric(
            name="rows_recovered",
            compute=ordered(_is_recovered),
            unit="share",
            larger_leaks=True,
            heading="recovered",
            meaning=f"rows with every entry within {TOLERANCE:.0%} of its range",
            described=_ROWS,
            shown_as="percent",
        ),
    )
    classes: ClassVar[Metric] = replace(LABEL_ACCURACY, compute=ordered(_right_class))
    """Metric of the label, the largest of a row's last entries, where these are one a class."""

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the n rows that took part, (n, d + 1); None if the truth is of no release."""
        tensors = truth.tensors()
        return tensors["rows"][tensors["members"]] if "rows" in tensors else None

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is (n, d + 1) as the truth, entries in [-1, 1]."""
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("rows were recovered from what was computed from no table")
        if answer.shape != true.shape:
            raise ScoringError(
                f"recovered rows are {tuple(answer.shape)}, those that took part "
                f"{tuple(true.shape)}"
            )
        # The comparison is false for NaN, which is refused as well.
        if not bool((answer.abs() <= 1 + _SLACK).all()):
            raise ScoringError(
                "recovered rows have entries beyond [-1, 1], or none that are finite"
            )

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores a row's data entries, and its class entries as a label; no constant feature."""
        true, tensors = self.truth_of(truth), truth.tensors()
        assert true is not None
        scored, classes = tensors["scored"], int(tensors["classes"])
        entries = [part[:, scored].double() for part in (answer, true)]
        values = self.compute_metrics(ScoredPair(claimed=entries[0], truth=entries[1]))
        # Entries of the classes are no data; they are scored as a label.
        if classes:
            pair = ScoredPair(claimed=answer[:, -classes:], truth=true[:, -classes:])
            values[self.classes.name] = self.classes.compute(pair)
        return TargetScores(values=values)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the score of guessing a row as the mean of the others; None without a release.

        A row without others is guessed as zeros; without any row there are no metrics.
        """
        members = self.truth_of(request.truth)
        if members is None:
            return None
        metrics: Mapping[str, float] = {}
        if len(members):
            # The sum less the row itself, for all rows at once.
            others = (members.sum(0) - members) / max(1, len(members) - 1)
            metrics = self.compare(others, request.truth, aids).means()
        return TargetGuess(name="mean_of_others", metrics=metrics)

    def tensors_to_save(
        self, found: Reconstruction, truth: Truth, assignments: Mapping[str, list[int]], aids: Aids
    ) -> dict[str, Tensor]:
        """Returns `rows`, `truth_rows` if answered, and the true `members`, `scored`, `classes`."""
        tensors = truth.tensors()
        kept: dict[str, Tensor] = {
            name: tensors[name] for name in ("members", "scored", "classes") if name in tensors
        }
        return {**kept, **super().tensors_to_save(found, truth, assignments, aids)}

    def read_saved(self, tensors: Tensors) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns (`rows` (n, d + 1) or None, truth by name) from what `tensors_to_save` returned.

        The truth is as `RowTruth` has it, but zero in `clients` and in rows that took no part.
        Without `members` nothing is returned: (None, {}).
        """
        if "members" not in tensors:
            return None, {}
        members, scored = tensors["members"], tensors["scored"]
        # Rows that took no part were not saved; no metric reads them.
        rows = torch.zeros(len(members), len(scored), dtype=torch.float64)
        if "truth_rows" in tensors:
            rows[members] = tensors["truth_rows"]
        classes = tensors.get("classes", torch.tensor(0))
        known = {"rows": rows, "members": members, "scored": scored, "classes": classes}
        known["clients"] = torch.zeros(len(members), dtype=torch.int64)
        return tensors.get("rows"), known

    def borrow(self, answer: Tensor, pairs: list[int], truth: Truth) -> Tensor:
        """Returns row `pairs[i]` of another release's `answer` (m, d + 1) as row i, the control."""
        return answer[pairs]


def _columns_recovered(pair: ScoredPair) -> Tensor:
    """Returns the share of records whose value is right, for each column; the aid numbers them."""
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


def _record_error(claimed: Tensor, truth: Tensor) -> MetricValue:
    return (claimed.double() - truth.double()).abs().mean(1)


class Records(Target):
    """Scores a batch's records (rows of a table), in any order."""

    part: ClassVar[str] = "records"
    """Name of answers (M, D), entries on [0, 1]; the truth is (N, D)."""
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
            compute=_columns_recovered,
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
            name="record_error", compute=ordered(_record_error), unit="range", larger_leaks=False
        ),
    )

    @property
    def truth_name(self) -> str:
        """Name of the truth's tensor of records, `images`: that of any batch's inputs."""
        return "images"

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the true records (N, D), entries on [0, 1]; None if the batch is of images."""
        return super().truth_of(truth) if "columns" in truth.tensors() else None

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is (M, D) in [0, 1], with the truth's D."""
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("records were answered, and the batch is of images")
        self.check_each(answer, true)
        # Both comparisons are false for NaN, which is refused as well.
        if not bool(((answer >= 0) & (answer <= 1)).all()):
            raise ScoringError("records: entries are beyond [0, 1], or not finite")

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Scores records matched by squared error; unmatched true ones only count as `missing`."""
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
        """Returns the scored guess, which is the mean of public rows.

        It is None without public rows or true records, or if the attack answered only other parts.
        """
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
        """Returns a record (D,) of NaN for a missing answer; `true` (N, D) gives its type."""
        return torch.full_like(true[0], torch.nan)
