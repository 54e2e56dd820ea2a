"""Lays the leaderboard out as a terminal table, with as many columns as its width allows."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.contracts.grant import Grant
from fedsim.report.control import (
    describe_comparison,
    invalid_comparisons,
    invalid_reasons,
    positive_controls,
    warnings,
)
from fedsim.report.figures import (
    format_accuracy,
    format_claim,
    format_epsilon,
    format_metric,
    format_number,
    format_signed,
)
from fedsim.report.row import LeaderboardRow, population_of
from fedsim.results.lines import Subject
from fedsim.scoring import METRICS, Metric, Share, Summary
from fedsim.words import number_of

if TYPE_CHECKING:
    from rich.table import Table


Cell = Callable[[LeaderboardRow], str]

_CLAIM = "ε (δ, unit, neighbours)"

_EPSILON = "ε"
"""Heading of the claim without its terms, which then stand in a line below the table."""


_INTERVAL = "[low, high]"


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table; without a value in any row it is left out."""

    heading: str
    cell: Cell
    short: Cell | None = None
    """A narrower cell; only columns with one are in every table, however narrow."""
    short_heading: str = ""
    """Heading of the narrower cells, if it is another."""
    of_attack: bool = False
    """Whether it says what an attack recovered: a dash where every trial failed."""

    def text(self, row: LeaderboardRow, *, short: bool = False) -> str:
        """Returns the cell of `row`."""
        if self.of_attack and not row.n_ok:
            return "–"
        return (self.short if short and self.short else self.cell)(row)

    def laid_out(self, rows: Sequence[LeaderboardRow], *, short: bool) -> list[str]:
        """Returns a heading, then a cell for each row."""
        heading = (short and self.short_heading) or self.heading
        return [heading, *(self.text(row, short=short) for row in rows)]


def _metric_column(metric: Metric, heading: str) -> _Column:
    def cell(row: LeaderboardRow) -> str:
        return format_metric(row.metrics[metric.name], metric)

    def mean(row: LeaderboardRow) -> str:
        summary = row.metrics[metric.name]
        return format_number(summary.mean if summary else None, metric.digits)

    short = mean if metric.narrow == "kept" else None
    return _Column(heading=heading, cell=cell, short=short, of_attack=True)


_METRICS = [(metric, metric.heading) for metric in METRICS.values() if metric.heading]

_PSNR, *_OTHERS = [_metric_column(metric, heading) for metric, heading in _METRICS]

_COLUMNS: list[_Column] = [
    _Column(heading="images", cell=lambda row: "–" if row.images is None else str(row.images)),
    _PSNR,
    _Column(heading="max", cell=lambda row: format_number(row.worst["psnr"], 1), of_attack=True),
    _Column(
        heading="gain",
        cell=lambda row: _signed(row.gain),
        short=lambda row: _signed(row.gain),
        of_attack=True,
    ),
    _Column(heading="≥3 dB", cell=lambda row: _share(row.leaking), of_attack=True),
    _Column(
        heading="other",
        cell=lambda row: "–" if row.other_update is None else f"{row.other_update.mean:.1f}",
        of_attack=True,
    ),
    *_OTHERS,
    _Column(heading="certified", cell=lambda row: _certified(row)),
    _Column(heading="AUC ≤", cell=lambda row: format_number(row.limit("membership_auc"), 2)),
    _Column(
        heading="no control",
        cell=lambda row: _no_control(row),
    ),
    _Column(
        heading="acc",
        cell=lambda row: format_accuracy(row.test_accuracy, row.accuracy),
        short=lambda row: format_accuracy(row.test_accuracy, row.accuracy).partition(" ")[0],
    ),
    _Column(
        heading=_CLAIM,
        cell=lambda row: _claim(row),
        short=lambda row: format_epsilon(row.epsilon),
        short_heading=_EPSILON,
    ),
    _Column(heading="sec", cell=lambda row: format_number(row.seconds, 1)),
]


def _left_out(when: str) -> list[str]:
    return [heading for metric, heading in _METRICS if metric.narrow == when]


_OPTIONAL = (
    *_left_out("kept"),
    *("AUC ≤", "certified", "no control", "≥3 dB", *_left_out("late"), _CLAIM, "acc"),
    *(*_left_out("early"), "other", "max", "images", "sec"),
)
"""Columns that a narrow table lacks, or holds in short, the most important first."""

_LEGEND: dict[str, str] = {
    # Column -> what it holds.
    "images": "different ones in all trials",
    "max": "the worst trial or image",
    "gain": "dB above the best guess of someone who saw no update",
    "≥3 dB": "trials that gain so much, and over another update, with the exact interval of that "
    "chance, of this attack alone (an answer's is wider: it allows for the choice of the best)",
    "other": "PSNR of the same attack on another update",
    **{heading: metric.meaning for metric, heading in _METRICS},
    "certified": "images of which the attacker knows, without any truth, that they are right, of "
    "all that it answered with; ! with those of them that are wrong",
    "AUC ≤": "the most AUC that ε and δ allow",
    "no control": "why there is no other update to compare with",
    "acc": "test accuracy and Wilson's interval, ! if no better than chance",
    _CLAIM: "guaranteed of all releases of the run, ∞ where nothing is",
    "sec": "seconds of a trial",
}

_LEGEND_OF_ROWS = {
    "images": "different rows in all trials",
    "max": "the worst trial",
    "gain": "dB above guessing the mean of the other rows",
}


def _legend(subject: Subject, rows: Sequence[LeaderboardRow], shown: Collection[str]) -> str:
    """Explains the columns `shown` in a table of attacks on `subject`."""
    of_images = subject == "images"
    size = "batch size" if of_images else "rows in a release, on average"
    sentences = [
        "▸: strongest attack on a defense (undefended first), of those that do better than on "
        f"another {'update' if of_images else 'release'}",
        f"B: {size}",
        "ok: trials that succeeded of all; failed ones count as guessing",
    ]
    if any(row.masked for row in rows):
        sentences.append(
            "masked: on a client's part of a secure sum, as if it were an update; aggregate: on "
            "the sum"
        )
    if any(not row.n_ok for row in rows):
        sentences.append("–: where all trials failed, their figures are the guess's")
    meanings = _LEGEND if of_images else _LEGEND | _LEGEND_OF_ROWS
    explained = {_CLAIM if heading == _EPSILON else heading for heading in shown}
    sentences += [
        f"{'ε' if column.heading == _CLAIM else column.heading}: {meanings[column.heading]}"
        for column in _COLUMNS
        if column.heading in explained
    ]
    if _INTERVAL in shown:
        sentences.append(
            f"{_INTERVAL}: Student's interval (three trials or more, not all equal), "
            f"{population_of(rows)}"
        )
    text = ". ".join(sentences) + "."
    hidden = [column.heading for column in _filled(rows) if column.heading not in explained]
    if hidden:
        text += (
            f" {number_of(len(hidden), 'column')} left out ({', '.join(hidden)}): widen the "
            f"terminal to {_whole_width(rows)}, or see report.html, or --format json or csv."
        )
    return text


def _whole_width(rows: Sequence[LeaderboardRow]) -> int:
    """Returns the width at which no table of `rows` lacks a column, in whole tens."""
    widths = []
    for comparison in dict.fromkeys(row.comparison for row in rows):
        members = [row for row in rows if row.comparison == comparison]
        columns = [column.laid_out(members, short=False) for column in _filled(members)]
        widths.append(_width(_fixed(members) + columns))
    return -(-max(widths) // 10) * 10


def terminal_table(rows: Sequence[LeaderboardRow], width: int, color: bool) -> str:
    """Returns the leaderboard as text, a table per comparison, then what columns mean."""
    from rich.console import Console
    from rich.text import Text

    text = io.StringIO()
    console = Console(
        file=text,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    invalid = invalid_comparisons(rows)
    marks = {control.comparison: control.mark for control in positive_controls(rows)}
    if not rows:
        console.print(Text(f"INVALID: {' '.join(invalid_reasons(rows))}", "bold red"))
    shown: dict[Subject, set[str]] = {}
    comparisons = list(dict.fromkeys(row.comparison for row in rows))
    for comparison in comparisons:
        members = [row for row in rows if row.comparison == comparison]
        console.print()
        title = Text(f"{marks[comparison]}  " if marks[comparison] else "", "bold red")
        name = _printable(describe_comparison(comparison, comparisons))
        console.print(title.append(name, "bold"))
        if members[0].variant:
            for folder in dict.fromkeys(path for row in members for path in row.folders):
                console.print(Text(f"in {_printable(_from_here(folder))}", "dim"), soft_wrap=True)
        if marks[comparison] == "INVALID":
            console.print(Text(f"INVALID: {_printable(invalid[comparison])}", "bold red"))
        for problem in warnings(members):
            console.print(Text(f"WARNING: {_printable(problem)}", "yellow"))
        console.print(Text(_printable(", ".join(filter(None, _shared(members)))), "dim"))
        columns = _columns_of(members, width)
        headings = shown.setdefault(members[0].subject, set())
        headings.update(heading for heading, *_ in columns)
        if any(" [" in cell for _, *cells in columns for cell in cells):
            headings.add(_INTERVAL)
        console.print(_grid(members, columns))
        if _EPSILON in [heading for heading, *_ in columns] and (claims := _claims(members)):
            console.print(Text(_printable(f"{_CLAIM}: {claims}"), "dim"))
    for subject, headings in shown.items():
        members = [row for row in rows if row.subject == subject]
        console.print(Text(_legend(subject, members, headings), "dim"))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _from_here(folder: str) -> str:
    """Returns the path of `folder` from the working directory, if it lies below that."""
    path, working_directory = Path(folder), Path.cwd()
    return str(
        path.relative_to(working_directory) if path.is_relative_to(working_directory) else path
    )


def _shared(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Words what all rows have in common, and the test sets behind their accuracies."""
    tests = {(row.accuracy.examples, row.accuracy.chance) for row in rows if row.accuracy}
    accuracies = [
        f"accuracy on {number_of(n, 'test example')} (chance {chance:.0%})"
        for n, chance in sorted(tests)
    ]
    return [_common(rows), *accuracies]


def _columns_of(rows: Sequence[LeaderboardRow], width: int) -> list[list[str]]:
    """Returns the columns that `width` allows: a heading, then a cell for each row."""
    fixed = _fixed(rows)
    return fixed + _fitting(rows, width - _width(fixed))


def _fixed(rows: Sequence[LeaderboardRow]) -> list[list[str]]:
    """Returns the columns that say what a row is about."""
    varying = _varying(rows)
    attacks = [
        f"{'▸' if row.strongest else ' '} "
        f"{' '.join([row.attack, *_malicious(row), *_own_cases(row, varying)])}"
        for row in rows
    ]
    return [
        ["defense", *(row.defense for row in rows)],
        ["attack", *attacks],
        ["B", *(str(row.batch_size) for row in rows)],
        ["ok", *(f"{row.n_ok}/{row.n}" for row in rows)],
    ]


def _grid(rows: Sequence[LeaderboardRow], columns: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for position, (heading, *_) in enumerate(columns):
        figures = position > 1
        grid.add_column(
            heading,
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures,
        )
    for index, row in enumerate(rows):
        first = index == 0 or row.defense != rows[index - 1].defense
        if first and index:
            grid.add_section()
        cells = [column[index + 1] for column in columns]
        cells[0] = cells[0] if first else ""
        style = "bold" if row.strongest else ""
        grid.add_row(*(Text(_printable(cell), style) for cell in cells))
    return grid


def _fitting(rows: Sequence[LeaderboardRow], width: int) -> list[list[str]]:
    """Returns the filled columns, as many as `width` allows: a heading, then a cell per row.

    Those that answer what leaks, at which price and guarantee are always there, at least in short.
    """
    filled = {column.heading: column for column in _filled(rows)}
    laid_out = {
        heading: column.laid_out(rows, short=True)
        for heading, column in filled.items()
        if column.short
    }
    for heading in _OPTIONAL:
        if heading in filled:
            whole = laid_out | {heading: filled[heading].laid_out(rows, short=False)}
            if _width([*whole.values()]) <= width:
                laid_out = whole
    return [laid_out[heading] for heading in filled if heading in laid_out]


def _filled(rows: Sequence[LeaderboardRow]) -> list[_Column]:
    """Returns the columns that have a value in some row."""
    return [column for column in _COLUMNS if any(column.text(row) != "–" for row in rows)]


def _claims(rows: Sequence[LeaderboardRow]) -> str:
    """Words each defense's claim, for a table too narrow for their column; empty without any."""
    claims = {row.defense: _claim(row) for row in rows}
    return "; ".join(f"{defense} {claim}" for defense, claim in claims.items() if claim != "–")


def _claim(row: LeaderboardRow) -> str:
    return format_claim(row.epsilon, row.delta, row.unit, row.relation)


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column)) + 1 for column in columns)


def _varying(rows: Sequence[LeaderboardRow]) -> list[str]:
    return [name for name in _cases_of(rows) if len({_case(row, name) for row in rows}) > 1]


def _cases_of(rows: Sequence[LeaderboardRow]) -> list[str]:
    subject = rows[0].subject
    columns = ["vantage", "server"] if subject == "images" else ["vantage"]
    return [*columns, *Grant.meanings(subject), "round"]


def _case(row: LeaderboardRow, name: str) -> Any:
    return getattr(row.knowledge if name in Grant.model_fields else row, name)


def _common(rows: Sequence[LeaderboardRow]) -> str:
    """Words what all rows share, so that it needs no column."""
    same = [name for name in _cases_of(rows) if name not in _varying(rows)]
    return ", ".join(_cases(rows[0], same)).replace("=", " ")


def _cases(row: LeaderboardRow, names: Sequence[str]) -> list[str]:
    return [f"{name}={_case(row, name)}" for name in names]


def _own_cases(row: LeaderboardRow, varying: Sequence[str]) -> list[str]:
    """Words what sets a row apart; the server's vantage is the usual one and is not named."""
    sight = [row.sight] if row.sight and (row.masked or "vantage" in varying) else []
    return sight + _cases(row, [name for name in varying if name != "vantage"])


def _malicious(row: LeaderboardRow) -> list[str]:
    """Words what a malicious server has done, in each of its rows: none may be quoted without."""
    return [] if row.server == "honest" else [f"({row.server})"]


def _share(share: Share | None) -> str:
    """Formats as `1/10 (0–45)`: trials of all, and the interval of their chance in percent."""
    if share is None:
        return "–"
    return f"{share.count}/{share.n} ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _no_control(row: LeaderboardRow) -> str:
    """Words in short why there is no other update: `one trial`, or `not yet`."""
    reason = row.no_control or "–"
    return reason.removeprefix("no control: ").removesuffix(" compared with another update")


def _certified(row: LeaderboardRow) -> str:
    stated = row.certificates
    if stated is None or stated.certified is None:
        return "–"
    wrong = f" !{stated.false}" if stated.false else ""
    return f"{stated.certified}/{stated.images}{wrong}"


def _signed(summary: Summary | None) -> str:
    return "–" if summary is None else format_signed(summary.mean)


def _printable(text: str) -> str:
    """Replaces control characters: a name in a row must not drive the reader's terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
