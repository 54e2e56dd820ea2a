"""Writes docs/results.md, docs/results-appendix.md and docs/papers.md from docs/results/*.csv.

    python docs/site/results.py            # writes both pages
    python docs/site/results.py --check    # status 1 where a page is not up to date

The sentences are in the two templates beside this file. A template reads every measured figure from
a file, and states with `hold` what has to be true of the figures for its sentences to stand.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from scipy.stats import spearmanr

from fedsim.scoring.statistics import summarize

DOCS = Path(__file__).parents[1]
TEMPLATES = {
    "docs/results.md": "results.md.j2",
    "docs/results-appendix.md": "results-appendix.md.j2",
    "docs/papers.md": "papers.md.j2",
}
"""Page -> its template in this folder."""

Row = Mapping[str, str]


class ClaimError(ValueError):
    """A sentence of a template is not true of the figures in the files."""


class Files:
    """The CSV files of a folder, as the templates ask for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str, **wanted: object) -> list[Row]:
        """Returns the rows of a file whose columns have these values, in the file's order."""
        with (self.folder / f"{name}.csv").open(encoding="utf-8") as file:
            found = [
                row
                for row in csv.DictReader(file)
                if all(row[key] == str(value) for key, value in wanted.items())
            ]
        if not found:
            raise ClaimError(f"docs/results/{name}.csv: no row with {wanted}")
        return found

    def row(self, name: str, **wanted: object) -> Row:
        """Returns the only row of a file whose columns have these values."""
        found = self.rows(name, **wanted)
        if len(found) > 1:
            raise ClaimError(f"docs/results/{name}.csv: {len(found)} rows with {wanted}")
        return found[0]


def number(value: object, digits: int = 1) -> str:
    """Writes a figure with so many digits behind the point; a dash where there is none."""
    text = str(value)
    if text == "":
        return "–"
    if text == "inf":
        return "∞"
    # Rounding may leave a zero with a minus sign.
    return f"{round(float(text), digits) + 0.0:.{digits}f}"


def signed(value: object, digits: int = 1) -> str:
    """Writes a difference with its sign."""
    return f"{float(str(value)):+.{digits}f}"


def with_interval(
    row: Row,
    metric: str,
    digits: int = 1,
    sign: bool = False,
    least: float = -math.inf,
    most: float = math.inf,
) -> str:
    """Writes a mean and its interval, as `23.1 [20.0, 26.3]`, or the mean where there is none.

    The columns are `metric`, `low`, `high` of a file of one metric, and else `metric_mean` or
    `metric`, `metric_low`, `metric_high`. An interval ends at `least` and `most`, which the metric
    cannot pass.
    """
    write = signed if sign else number
    mean = row.get(f"{metric}_mean", row.get(metric, ""))
    low = row.get(f"{metric}_low", row.get("low", ""))
    high = row.get(f"{metric}_high", row.get("high", ""))
    shown = write(mean, digits) if mean else "–"
    if not (low and high):
        return shown
    ends = number(max(float(low), least), digits), number(min(float(high), most), digits)
    return f"{shown} [{ends[0]}, {ends[1]}]"


def mean_of_pairs(first: Sequence[Row], second: Sequence[Row], column: str) -> Row:
    """Returns mean and interval of how far a column is above that of the same trials elsewhere."""
    trial = ("seed", "batch_size", "client", "trial")
    if [[row[key] for key in trial] for row in first] != [[r[k] for k in trial] for r in second]:
        raise ClaimError("two attacks were not compared on the same batches")
    above: dict[object, list[float]] = {}
    for turn, (one, other) in enumerate(zip(first, second, strict=True)):
        # Trials that share an image count as one.
        above.setdefault(one.get("group", turn), []).append(
            float(one[column]) - float(other[column])
        )
    return mean_of_rows([{column: str(mean(group))} for group in above.values()], column)


def mean_of_rows(lines: Sequence[Row], column: str) -> Row:
    """Returns mean and interval of a column of independent rows, in `with_interval`'s form."""
    found = summarize([float(line[column]) for line in lines])
    if found is None or found.low is None:
        raise ClaimError("an interval needs three different values")
    ends = {"mean": found.mean, "low": found.low, "high": found.high}
    return {f"{column}_{name}": str(value) for name, value in ends.items()}


def share(value: object) -> str:
    """Writes a share as a percentage."""
    return f"{float(str(value)):.0%}"


def mean(values: Iterable[object]) -> float:
    """Returns the mean of figures."""
    return statistics.fmean(float(str(value)) for value in values)


def extra(values: Iterable[object]) -> list[float]:
    """Returns by how many percent each ratio is above one."""
    return [100 * (float(str(value)) - 1) for value in values]


def span(values: Iterable[object], digits: int = 1) -> str:
    """Writes the least and the largest of some figures, as `5.6 to 7.3`."""
    figures = [float(str(value)) for value in values]
    return f"{number(min(figures), digits)} to {number(max(figures), digits)}"


def rank_correlation(rows: Sequence[Row], first: str, second: str) -> float:
    """Returns Spearman's rank correlation of two columns."""
    pairs = [[float(row[name]) for row in rows] for name in (first, second)]
    return float(spearmanr(*pairs).statistic)


def hold(condition: bool) -> str:
    """Raises `ClaimError` where a template's sentence is not true of the figures."""
    if not condition:
        raise ClaimError("a sentence is not true of the figures in docs/results")
    return ""


def render(page: str, folder: Path = DOCS / "results") -> str:
    """Returns the text of a page for the CSV files of `folder`.

    Raises:
        ClaimError: a file lacks a row, or a sentence of the template is not true of the figures.
    """
    files = Files(folder)
    environment = Environment(  # noqa: S701 - the pages are Markdown
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters.update(
        number=number, signed=signed, share=share, mean=mean, span=span, extra=extra
    )
    environment.globals.update(
        rows=files.rows,
        row=files.row,
        interval=with_interval,
        hold=hold,
        rank_correlation=rank_correlation,
        mean_of_pairs=mean_of_pairs,
        mean_of_rows=mean_of_rows,
        float=float,
    )
    return environment.get_template(TEMPLATES[page]).render()


def main(words: Sequence[str]) -> int:
    """Writes the pages, or with `--check` names those that are not up to date."""
    stale = []
    for page in TEMPLATES:
        path, text = DOCS.parent / page, render(page)
        if "--check" not in words:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(page)
    for page in stale:
        print(f"{page}: not what its files say; run python docs/site/results.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
