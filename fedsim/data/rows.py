"""Turns columns with declared ranges into rows of bounded norm, alike for every table."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedsim.contracts.data import DataSource
from fedsim.data.images import split_by_content, stratified_split
from fedsim.types import FedsimError, Table
from fedsim.words import number_of

_TEST_FRACTION = 0.2
_ROUNDING = 1 - 2**-48
"""Keeps a row that was scaled to the bound from exceeding it in the last digit."""


class Column(BaseModel):
    """A column of numbers and the range that is declared for it: public, not read from the data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    low: float
    """This value, and whatever is below it, becomes -1."""
    high: float
    """This value, and whatever is above it, becomes +1."""

    @model_validator(mode="after")
    def _ordered(self) -> Column:
        if not self.low < self.high:
            raise ValueError(
                f"column {self.name}: low ({self.low}) is not below high ({self.high})"
            )
        return self

    def scaled(self, values: Tensor) -> Tensor:
        """Returns values of the column on [-1, 1]."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return ((values - middle) / half).clamp(-1, 1)


class TableSource(DataSource):
    """A table: features and a target, each scaled to [-1, 1] by its declared range.

    A constant feature 1 comes last among the features (`intercept`). A training row (features and
    target) whose L2 norm exceeds `row_norm` is multiplied by row_norm / norm, so that it keeps its
    direction; test rows are left as they are. A fifth of the rows of each class is the test split;
    of a file, each row by itself with that chance.
    """

    row_norm: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """l, the bound on the L2 norm of a training row. Default: sqrt(features + 1), which no row of
    scaled columns exceeds."""
    intercept: bool = True
    """Whether there is a constant feature."""

    def table(
        self,
        name: str,
        features: Tensor,
        columns: tuple[Column, ...],
        target: Tensor,
        target_name: str,
        classes: tuple[str, ...] | None,
        client_of: Tensor | None = None,
        *,
        private_statistics: tuple[str, ...] | None = None,
        split_by_row: bool = False,
    ) -> Table:
        """Builds the table of raw features and a scaled target.

        Args:
            name: of the source.
            features: (n, d) raw values.
            columns: the features' names and ranges.
            target: (n,) on [-1, 1].
            target_name: of the target's column.
            classes: of a target of two classes, else None.
            client_of: (n,) each row's client, counted from 0; None if the source does not know.
            private_statistics: see `Table`; empty if neither ranges nor classes follow from rows.
            split_by_row: whether a row's split follows from that row alone.

        Raises:
            FedsimError: there are too few rows to leave any for the test.
        """
        scaled = [column.scaled(features[:, i]) for i, column in enumerate(columns)]
        names = [column.name for column in columns]
        if self.intercept:
            scaled.append(torch.ones_like(target))
            names.append("intercept")
        rows = torch.stack([*scaled, target], dim=1)
        labels = (target > 0).long() if classes else torch.zeros(len(target), dtype=torch.int64)
        if split_by_row:
            contents = (row.numpy().tobytes() for row in rows)
            train, test = split_by_content(contents, _TEST_FRACTION, name)
        else:
            train, test = stratified_split(labels, _TEST_FRACTION, name)
        for split, part in (("training", train), ("test", test)):
            if not len(part):
                raise FedsimError(
                    f"{name} has {number_of(len(rows), 'row')}, which leaves none for the {split} "
                    "split; add rows"
                )
        bound = math.sqrt(rows.shape[1]) if self.row_norm is None else self.row_norm
        return Table(
            name=name,
            train_rows=bounded(rows[train], bound),
            train_labels=labels[train],
            test_rows=rows[test],
            columns=(*names, target_name),
            row_norm=bound,
            classes=classes,
            intercept=self.intercept,
            client_of=None if client_of is None else client_of[train],
            private_statistics=private_statistics,
        )


def bounded(rows: Tensor, norm: float) -> Tensor:
    """Scales rows (n, d) that are longer than `norm` down to it."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return torch.where(lengths > norm, rows * (norm / lengths * _ROUNDING), rows)
