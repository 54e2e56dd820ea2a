"""Rows: those of a table, each asked for by itself, that took part in a closed-form release.

Entries are in [-1, 1], each column's declared range. Rows are compared in their order and never
matched, since each was asked for by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.metric import (
    Metric,
    MetricValue,
    ScoredPair,
    ScoringError,
    TensorMetric,
    Term,
    Unavailable,
    ordered,
)
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess, TargetScores
from fedsim.scoring import image
from fedsim.targets.images import PSNR, RECOGNIZABLE_PSNR, RMSE
from fedsim.targets.labels import LABEL_ACCURACY
from fedsim.types import Payload, Reconstruction, ReleaseKind, Tensors, Truth

TOLERANCE = 0.05
"""A row is recovered if every entry is within this share of its column's range."""

_SLACK = 1e-6
"""Rounding may take a row's entries this far beyond [-1, 1]."""


def row_error(claimed: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the squared distance of each pair (N, d) over the true squared length, (N,)."""
    length = truth.square().sum(1)
    if not bool(length.all()):
        return Unavailable("a true row is zero, so there is no relative error")
    return (claimed - truth).square().sum(1) / length


def row_cosine(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns the cosine of each pair of rows (N, d), (N,) in [-1, 1]; 0 if one is zero."""
    return F.cosine_similarity(claimed, truth, dim=1, eps=1e-30)


def is_recovered(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 where every entry of a row (N, d) is within `TOLERANCE`, else 0; (N,)."""
    return ((claimed - truth).abs().amax(1) <= 2 * TOLERANCE).double()


def right_class(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 where the largest class entry (N, classes) is the true one's, else 0; (N,)."""
    return (claimed.argmax(1) == truth.argmax(1)).double()


def _as_pixels(
    function: TensorMetric,
) -> Callable[[ScoredPair], MetricValue]:
    """Scales entries of rows from [-1, 1] to [0, 1], so that a decibel means the same."""
    return lambda pair: function((pair.claimed + 1) / 2, (pair.truth + 1) / 2)


_ROWS = Term(
    key="rows",
    name="row err, recovered",
    meaning="Of tables: squared error over squared length of a row, and the share of rows with "
    "every entry near the true one. The guess is the mean of the other rows.",
)


class Rows(Target):
    """Rows of a table that took part in a release."""

    part: ClassVar[str] = "rows"
    noun: ClassVar[str] = "rows"
    singular: ClassVar[str] = "row"
    order: ClassVar[float] = 3.0
    payloads: ClassVar[tuple[Payload, ...]] = get_args(ReleaseKind)
    asked_singly: ClassVar[bool] = True
    leaks: ClassVar[float] = 3.0
    exposes: ClassVar[float | None] = 10.0
    recognizable_from: ClassVar[float | None] = RECOGNIZABLE_PSNR
    metrics: ClassVar[tuple[Metric, ...]] = (
        replace(PSNR, compute=_as_pixels(image.psnr)),
        replace(RMSE, compute=_as_pixels(image.rmse)),
        Metric(
            name="row_error",
            compute=ordered(row_error),
            unit="relative",
            larger_leaks=False,
            heading="row err",
            meaning="squared error over squared length",
            described=_ROWS,
            digits=3,
            narrow="late",
        ),
        Metric(name="row_cosine", compute=ordered(row_cosine), unit="none", larger_leaks=True),
        Metric(
            name="rows_recovered",
            compute=ordered(is_recovered),
            unit="share",
            larger_leaks=True,
            heading="recovered",
            meaning=f"rows with every entry within {TOLERANCE:.0%} of its range",
            described=_ROWS,
            shown_as="percent",
        ),
    )
    classes: ClassVar[Metric] = replace(LABEL_ACCURACY, compute=ordered(right_class))
    """Where a row ends with an entry for each class, the largest is its label."""

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns the rows that took part."""
        tensors = truth.tensors()
        return tensors["rows"][tensors["members"]] if "rows" in tensors else None

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Refuses rows that are not one for each that took part, or have impossible entries.

        Raises:
            ScoringError: they are, or no row took part in what was observed.
        """
        true = self.truth_of(truth)
        if true is None:
            raise ScoringError("rows were recovered from what was computed from no table")
        if answer.shape != true.shape:
            raise ScoringError(
                f"recovered rows are {tuple(answer.shape)}, those that took part "
                f"{tuple(true.shape)}"
            )
        if not bool((answer.abs() <= 1 + _SLACK).all()):
            raise ScoringError(
                "recovered rows have entries beyond [-1, 1], or none that are finite"
            )

    def compare(self, answer: Tensor, truth: Truth, aids: Aids) -> TargetScores:
        """Compares entries that are data; the constant feature is none."""
        true, tensors = self.truth_of(truth), truth.tensors()
        assert true is not None
        scored, classes = tensors["scored"], int(tensors["classes"])
        entries = [part[:, scored].double() for part in (answer, true)]
        values = self.compute_metrics(ScoredPair(claimed=entries[0], truth=entries[1]))
        if classes:
            pair = ScoredPair(claimed=answer[:, -classes:], truth=true[:, -classes:])
            values[self.classes.name] = self.classes.compute(pair)
        return TargetScores(values=values)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the mean of the other rows, without the release (of none: the middle)."""
        members = self.truth_of(request.truth)
        if members is None:
            return None
        metrics: Mapping[str, float] = {}
        if len(members):
            others = (members.sum(0) - members) / max(1, len(members) - 1)
            metrics = self.compare(others, request.truth, aids).means()
        return TargetGuess(name="mean_of_others", metrics=metrics)

    def tensors_to_save(
        self,
        found: Reconstruction,
        truth: Truth,
        assignments: Mapping[str, list[int]],
        aids: Aids,
    ) -> dict[str, Tensor]:
        """Adds to the rows who took part, and which entries are scored."""
        tensors = truth.tensors()
        kept: dict[str, Tensor] = {
            name: tensors[name] for name in ("members", "scored", "classes") if name in tensors
        }
        return {**kept, **super().tensors_to_save(found, truth, assignments, aids)}

    def read_saved(self, tensors: Tensors) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns the rows, and a truth of which only those that took part are known."""
        if "members" not in tensors:
            return None, {}
        members, scored = tensors["members"], tensors["scored"]
        rows = torch.zeros(len(members), len(scored), dtype=torch.float64)
        if "truth_rows" in tensors:
            rows[members] = tensors["truth_rows"]
        classes = tensors.get("classes", torch.tensor(0))
        known = {"rows": rows, "members": members, "scored": scored, "classes": classes}
        known["clients"] = torch.zeros(len(members), dtype=torch.int64)
        return tensors.get("rows"), known

    def borrow(self, answer: Tensor, pairs: list[int], truth: Truth) -> Tensor:
        """Returns each row's counterpart."""
        return answer[pairs]
