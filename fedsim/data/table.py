"""Reads a table from a CSV file, by a schema of its columns and their ranges."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, final

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedsim.data.rows import CategoryColumn, RangeColumn, TableSource, TargetColumn, Texts
from fedsim.system import paths
from fedsim.types import FedsimError, Table
from fedsim.words import number_of

_MEANT = {
    "client": "called `client`: name it (`client: client`) to have clients hold their own rows",
    "split": "called `split`: a fifth of the rows is drawn to test on, whatever it says",
}
"""Column names that look meant for use, and the note that a report shows if they are not used."""
_LINE_CHARACTERS = 1 << 24
_MAX_DIGITS = 18
"""Maximum number of digits of a client's number, which is kept in 64 bits."""


class ClassColumn(BaseModel):
    """The column of a CSV file that holds the class to predict.

    `classes` are the texts that its cells may hold (spaces around a cell do not count), all
    different; class k, from 0, is `classes[k]`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    classes: Texts
    """Text of each class. Closed-form learners take two: the first becomes -1, the other +1."""

    def scale(self, values: Tensor) -> Tensor:
        """Maps numbers of classes, 0 to K - 1 (any shape), evenly onto [-1, 1]."""
        return 2 * values / (len(self.classes) - 1) - 1


@final
class TableFile(TableSource):
    """A CSV file (UTF-8, a line of column names first) with a range for each column that is used.

    Instead of a range, a column may have categories. Columns that the schema does not name are left
    out. A value that is missing, no finite number or no declared category is refused with its line
    and column; one beyond its range is set to the range's end.
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
        """Reads the table.

        Raises:
            FedsimError: the file cannot be read, a column is missing, or a value is not what the
                schema says; with the line and the column.
        """
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
        """Yields (line number, column -> text) of each row."""
        try:
            with paths.open_regular(paths.from_home(self.path), paths.LINES) as file:
                # The csv module splits the lines itself, since a quoted value may hold a line
                # break.
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
