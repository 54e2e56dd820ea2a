"""Scales columns with declared ranges into rows of bounded norm, and reads them from CSV files."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, final

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedsim.contracts.learner import DataSource
from fedsim.data.images import split_by_content, stratified_split
from fedsim.system import paths
from fedsim.types import FedsimError, InputColumn, Table
from fedsim.words import number_of

_TEST_FRACTION = 0.2
_ROUNDING = 1 - 2**-48
"""Keeps a row that was scaled to the bound from exceeding it in the last digit."""


class RangeColumn(BaseModel):
    """A column of numbers and the range that is declared for it: public, not read from the data.

    A ValidationError of pydantic says that `low` is not below `high`, or one is not finite.
    """

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
        """Returns the column as a model gets it: a quantity with this name."""
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
    """A column of 2 to 1,024 different categories, as a file writes them; else ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    categories: Texts
    """Text of each category. A row has one entry per category: +1 for its own, -1 for others."""

    def entries(self, values: Tensor) -> dict[str, Tensor]:
        """Returns `column=category` -> (n,) of -1 and +1; `values` (n,) are categories' indices."""
        return {
            f"{self.name}={category}": 2.0 * (values == number) - 1
            for number, category in enumerate(self.categories)
        }

    def describe(self) -> InputColumn:
        """Returns the column as a model gets it: its name and categories."""
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
    """Base of sources of a table: features and a target, scaled to [-1, 1] by declared ranges.

    A constant feature 1 comes last among the features (`intercept`). A training row (features and
    target) longer than `row_norm` in the L2 norm is scaled down to it, and keeps its direction.
    Test rows are left as they are. The test split has a fifth of the rows of each class; but a
    file's rows go there each with that chance, equal ones together, whatever their class.
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
        """Builds the table of raw features and a scaled target; a FedsimError if a split is empty.

        Args:
            name: Name of the source.
            features: (n, d) float64 raw values, or numbers of categories, from 0.
            columns: The features' d columns, in the order of `features`.
            target: The target's name, its n values and its classes.
            client_of: (n,) int64 each row's client, from 0; None if the source does not know.
            private_statistics: Names of what was computed from training rows, which voids claims
                of privacy; empty if nothing was, None if that is not known.
            split_by_row: Whether a row's split follows from that row alone.
        """
        entries: dict[str, Tensor] = {}
        for i, column in enumerate(columns):
            entries |= column.entries(features[:, i])
        if self.intercept:
            entries["intercept"] = torch.ones_like(target.values)
        rows = torch.stack([*entries.values(), target.values], dim=1)
        # Maps [-1, 1] to 0, ..., K - 1; without classes all rows are split as one class.
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
    """Returns a copy of `rows` (n, d) float64, those of a longer L2 norm scaled down to `norm`."""
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    # A row of zeros divides by zero in the branch that is not taken for it.
    return torch.where(lengths > norm, rows * (norm / lengths * _ROUNDING), rows)


_MEANT = {
    "client": "called `client`: name it (`client: client`) to have clients hold their own rows",
    "split": "called `split`: a fifth of the rows is drawn to test on, whatever it says",
}
"""Column names that look meant for use, and the note that a report shows if they are not used."""
_LINE_CHARACTERS = 1 << 24
_MAX_DIGITS = 18
"""Maximum number of digits of a client's number, which is kept in 64 bits."""


class ClassColumn(BaseModel):
    """The column of a CSV file that holds the class to predict; a bad one is a ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    classes: Texts
    """Texts of 2 to 1,024 different classes, as cells hold them between spaces; class k, from 0, is
    `classes[k]`. Closed-form learners take two: the first becomes -1, the other +1."""

    def scale(self, values: Tensor) -> Tensor:
        """Maps numbers of classes, 0 to K - 1 of K (any shape), evenly onto [-1, 1]."""
        return 2 * values / (len(self.classes) - 1) - 1


@final
class TableFile(TableSource):
    """A CSV file (UTF-8, a line of column names first) with a range for each column that is used.

    Instead of a range, a column may have categories. Columns that the schema does not name are left
    out. A value that is missing, no finite number or no declared category is refused with its line
    and column. One beyond its range is set to the range's end.
    """

    path: str
    """The file; `~` is the home directory."""
    features: Annotated[tuple[RangeColumn | CategoryColumn, ...], Field(min_length=1)]
    """The features, each `{name: ..., low: ..., high: ...}`, or of categories `{name: ...,
    categories: [a, b]}`."""
    target: RangeColumn | ClassColumn
    """Target to predict: `{name: ..., low: ..., high: ...}` or `{name: ..., classes: [a, b]}`."""
    client: str | None = None
    """Column with the number of each row's client, from 0, for the natural partition."""

    @model_validator(mode="after")
    def _distinct(self) -> TableFile:
        names = [column.name for column in (*self.features, self.target)]
        if len(set(names)) < len(names):
            raise ValueError("a column is named twice, among the features or as the target")
        return self

    def load(self) -> Table:
        """Reads the table; a FedsimError says what is missing or breaks the schema, and where."""
        features, target, owners = [], [], []
        row: dict[str, str] = {}
        for line, row in self._lines():
            where = f"{self.path}, line {line}"
            features.append([_value(row, column, where) for column in self.features])
            target.append(_value(row, self.target, where))
            if self.client is not None:
                owners.append(_count(row, self.client, where))
        if not target:
            raise FedsimError(f"{self.path} has no rows below its line of column names")
        raw = torch.tensor(target, dtype=torch.float64)
        classes = None if isinstance(self.target, RangeColumn) else self.target.classes
        table = self.table(
            "table",
            torch.tensor(features, dtype=torch.float64),
            self.features,
            TargetColumn(self.target.name, self.target.scale(raw), classes),
            torch.tensor(owners, dtype=torch.int64) if owners else None,
            private_statistics=(),
            split_by_row=True,
        )
        used = {self.client, self.target.name, *(column.name for column in self.features)}
        # The last row outlives the loop: its keys are the file's columns.
        unused = [(said, 1) for name, said in _MEANT.items() if name in row and name not in used]
        return replace(table, left_out=tuple(unused))

    def _lines(self) -> Iterator[tuple[int, dict[str, str]]]:
        try:
            with paths.open_regular(paths.from_home(self.path), paths.LINES) as file:
                # The csv module splits the lines itself: a quoted value may hold a line break.
                text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
                yield from self._parse_lines(self._limit_lines(text))
        except OSError as error:
            raise FedsimError(
                f"{self.path} cannot be read ({error.strerror}): correct `path`"
            ) from error
        except (csv.Error, UnicodeDecodeError) as error:
            raise FedsimError(f"{self.path} is no CSV file in UTF-8: {error}") from error

    def _limit_lines(self, file: io.TextIOWrapper) -> Iterator[str]:
        for number in itertools.count(1):
            # Without a bound, a file without line breaks would be read into memory as one line.
            line = file.readline(_LINE_CHARACTERS + 1)
            if len(line) > _LINE_CHARACTERS:
                raise FedsimError(
                    f"{self.path}, line {number}: more than {_LINE_CHARACTERS:,} characters; end "
                    "each row with a line break"
                )
            if not line:
                return
            yield line

    def _parse_lines(self, file: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
        reader = csv.reader(file, strict=True)
        header = next(reader, [])
        names = [column.name for column in (*self.features, self.target)]
        for name in names if self.client is None else [*names, self.client]:
            if header.count(name) != 1:
                raise FedsimError(
                    f"{self.path}, line 1: {header.count(name) or 'no'} column is called {name!r} "
                    f"(there are {', '.join(header) or 'none'}); correct the file or the schema"
                )
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise FedsimError(
                    f"{self.path}, line {reader.line_num}: "
                    f"{number_of(len(cells), 'value')} for {number_of(len(header), 'column')}; "
                    "the line is torn, or a value holds a comma without quotes"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))


def _value(
    row: dict[str, str], column: RangeColumn | CategoryColumn | ClassColumn, where: str
) -> float:
    """Returns the cell of `column` as a number; for categories and classes, their index from 0."""
    if isinstance(column, RangeColumn):
        return _number(row, column.name, where)
    if isinstance(column, ClassColumn):
        kind, declared = "classes", column.classes
    else:
        kind, declared = "categories", column.categories
    text = row[column.name].strip()
    if text not in declared:
        raise FedsimError(
            f"{where}, column {column.name!r}: {text[:40]!r} is none of the "
            f"{kind} {' and '.join(declared)[:200]}; correct the file or the schema"
        )
    return float(declared.index(text))


def _number(row: dict[str, str], column: str, where: str) -> float:
    text = row[column].strip()
    try:
        value = math.nan if "_" in text else float(text)  # Python reads 1_0 as 10
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FedsimError(
            f"{where}, column {column!r}: {text[:40]!r} is no finite number; fill it in, or "
            "drop the row or the column"
        )
    return value


def _count(row: dict[str, str], column: str, where: str) -> int:
    text = row[column].strip()
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise FedsimError(
            f"{where}, column {column!r}: {text[:40]!r} is no client; expected a whole number "
            f"from 0 of at most {_MAX_DIGITS} digits"
        )
    return int(text)
