"""Turns columns with declared ranges into rows of bounded norm, alike for every table."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.data.images import split_by_content, stratified_split
from fedsim.types import FedsimError, InputColumn, Table
from fedsim.words import number_of

_TEST_FRACTION = 0.2
_ROUNDING = 1 - 2**-48
"""Keeps a row that was scaled to the bound from exceeding it in the last digit."""


class RangeColumn(BaseModel):
    """A column of numbers and the range that is declared for it: public, not read from the data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    low: float
    """This value, and whatever is below it, becomes -1."""
    high: float
    """This value, and whatever is above it, becomes +1."""

    @model_validator(mode="after")
    def _check_ends(self) -> RangeColumn:
        if not self.low < self.high:
            raise ValueError(
                f"column {self.name}: low ({self.low}) is not below high ({self.high})"
            )
        return self

    def scale(self, values: Tensor) -> Tensor:
        """Maps raw values (any shape) linearly to [-1, 1]; those beyond the range become ±1."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return ((values - middle) / half).clamp(-1, 1)

    def entries(self, values: Tensor) -> dict[str, Tensor]:
        """Returns name -> entry (n,) in [-1, 1] of raw `values` (n,): the column's only one."""
        return {self.name: self.scale(values)}

    def describe(self) -> InputColumn:
        """Describes the column to a model: its name."""
        return InputColumn(name=self.name)


def _require_distinct(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text, count in Counter(texts).items():
        if count > 1:
            raise ValueError(f"{text!r} is declared twice; remove one")
    return texts


Texts = Annotated[
    tuple[str, ...], Field(min_length=2, max_length=1024), AfterValidator(_require_distinct)
]
"""Texts that the cells of a column may hold, all different."""


class CategoryColumn(BaseModel):
    """A column of categories, as the file writes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    categories: Texts
    """Text of each category. A row has one entry per category: +1 for its own, -1 for others."""

    def entries(self, values: Tensor) -> dict[str, Tensor]:
        """Returns `column=category` -> entry (n,) of -1 and +1 for (n,) numbers of categories."""
        return {
            f"{self.name}={category}": 2.0 * (values == number) - 1
            for number, category in enumerate(self.categories)
        }

    def describe(self) -> InputColumn:
        """Describes the column to a model: its name and categories."""
        return InputColumn(name=self.name, categories=self.categories)


@dataclass(frozen=True, eq=False)
class TargetColumn:
    """The column that is predicted, with its values scaled."""

    name: str
    values: Tensor
    """(n,) float64 in [-1, 1]."""
    classes: tuple[str, ...] | None = None
    """Names of the target's classes, in the order of their values, which are evenly spaced from -1
    to 1; None if the target is a number."""


class TableSource(DataSource):
    """A table: features and a target, each scaled to [-1, 1] by its declared range.

    A constant feature 1 comes last among the features (`intercept`). A training row (features and
    target) whose L2 norm exceeds `row_norm` is multiplied by row_norm / norm, so that it keeps its
    direction; test rows are left as they are. The test split has a fifth of the rows of each class.
    In a table from a file, each row goes there by itself, with that chance.
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
        columns: tuple[RangeColumn | CategoryColumn, ...],
        target: TargetColumn,
        client_of: Tensor | None = None,
        *,
        private_statistics: tuple[str, ...] | None = None,
        split_by_row: bool = False,
    ) -> Table:
        """Builds the table of raw features and a scaled target.

        Args:
            name: name of the source.
            features: (n, d) float64 raw values, or numbers of categories.
            columns: the features' columns, in the order of `features`.
            target: the target's name, values and classes.
            client_of: (n,) each row's client, counted from 0; None if the source does not know.
            private_statistics: see `Table`; empty if neither ranges nor classes follow from rows.
            split_by_row: whether a row's split follows from that row alone.

        Raises:
            FedsimError: there are too few rows to leave any for the test.
        """
        entries: dict[str, Tensor] = {}
        for i, column in enumerate(columns):
            entries |= column.entries(features[:, i])
        if self.intercept:
            entries["intercept"] = torch.ones_like(target.values)
        rows = torch.stack([*entries.values(), target.values], dim=1)
        # Maps [-1, 1] to 0, ..., K - 1. Without classes the factor is 0, and all rows are split as
        # one class.
        labels = ((target.values + 1) / 2 * (len(target.classes or ".") - 1)).round().long()
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
        # No scaled entry exceeds 1 in size, so the root of their number bounds the norm.
        bound = math.sqrt(rows.shape[1]) if self.row_norm is None else self.row_norm
        return Table(
            name=name,
            train_rows=bound_rows(rows[train], bound),
            train_labels=labels[train],
            test_rows=rows[test],
            columns=(*entries, target.name),
            feature_columns=tuple(column.describe() for column in columns),
            row_norm=bound,
            classes=target.classes,
            intercept=self.intercept,
            client_of=None if client_of is None else client_of[train],
            private_statistics=private_statistics,
        )


def bound_rows(rows: Tensor, norm: float) -> Tensor:
    """Returns `rows` (n, d), those of a longer L2 norm scaled down to `norm`."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    # A row of zeros divides by zero in the branch that is not taken for it.
    return torch.where(lengths > norm, rows * (norm / lengths * _ROUNDING), rows)
