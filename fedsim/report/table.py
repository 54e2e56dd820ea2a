"""Lays the leaderboard out as a terminal table of a fixed set of columns."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.contracts.grant import Grant
from fedsim.report.figures import format_accuracy, format_claim, format_epsilon, format_number
from fedsim.report.judge import positive_controls
from fedsim.report.measured import ABSENT, heading_of, measure_row
from fedsim.report.messages import invalid_comparisons, invalid_reasons, warnings
from fedsim.report.row import LeaderboardRow, population_of
from fedsim.report.threat import describe_comparison
from fedsim.scoring import METRICS
from fedsim.words import number_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_CLAIM = "ε (δ, unit, neighbours)"


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table."""

    heading: str
    cell: Callable[[LeaderboardRow], str]
    meaning: str = ""
    short: Callable[[LeaderboardRow], str] | None = None
    """A narrower cell."""
    left_out: int = 0
    """Order in which columns leave a table that is too wide; 0: never."""


def _value(row: LeaderboardRow) -> str:
    found = measure_row(row, row.ranked_by)
    return ABSENT if found.value == ABSENT else found.words


def _mean(row: LeaderboardRow) -> str:
    metric, summary = METRICS[row.ranked_by], row.metrics[row.ranked_by]
    if not row.n_ok or summary is None:
        return ABSENT
    return f"{heading_of(metric)} {format_number(summary.mean, metric.digits)}"


def _above(row: LeaderboardRow) -> str:
    return measure_row(row, row.ranked_by).above.partition(" ")[0]


def _above_other(row: LeaderboardRow) -> str:
    """Words in short why there is no other update (`one trial`, `not yet`), or what is above it."""
    if row.no_control:
        reason = row.no_control.removeprefix("no control: ")
        return reason.removesuffix(" compared with another update")
    return measure_row(row, row.ranked_by).above_other.partition(" ")[0]


def _share(row: LeaderboardRow) -> str:
    """Formats as `1/10 (0–45)`: trials of all, and the interval of their chance in percent."""
    share = row.leaking
    if share is None or not row.n_ok:
        return ABSENT
    return f"{share.count}/{share.n} ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _format_certified(row: LeaderboardRow) -> str:
    stated = row.certificates
    if stated is None or stated.certified is None:
        return ABSENT
    return f"{stated.certified}/{stated.images}" + (f" !{stated.false}" if stated.false else "")


def _accuracy(row: LeaderboardRow) -> str:
    return format_accuracy(row.test_accuracy, row.accuracy)


_COLUMNS = (
    _Column(heading="B", cell=lambda row: str(row.batch_size), meaning="batch size"),
    _Column(
        heading="ok",
        cell=lambda row: f"{row.n_ok}/{row.n}",
        meaning="trials that succeeded of all; failed ones count as guessing",
    ),
    _Column(
        heading="found",
        cell=_value,
        short=_mean,
        meaning="the metric that ranks the attack",
        left_out=4,
    ),
    _Column(
        heading="gain",
        cell=_above,
        meaning="beyond the best guess of someone who saw no update (of PSNR: dB)",
    ),
    _Column(
        heading="other",
        cell=_above_other,
        meaning="beyond the same attack on another update, or why there is no control",
        left_out=3,
    ),
    _Column(
        heading="≥3 dB",
        cell=_share,
        meaning="trials that gain so much, with the exact interval of that chance, of this attack "
        "alone",
        left_out=2,
    ),
    _Column(
        heading="certified",
        cell=_format_certified,
        meaning="images of which the attacker knows, without any truth, that they are right; ! "
        "with those that are wrong",
    ),
    _Column(
        heading="acc",
        cell=_accuracy,
        short=lambda row: _accuracy(row).partition(" ")[0],
        meaning="test accuracy and Wilson's interval, ! if no better than chance",
        left_out=5,
    ),
    _Column(
        heading="ε",
        cell=lambda row: format_epsilon(row.epsilon),
        meaning="guaranteed of all releases of the run, ∞ where nothing is",
    ),
    _Column(
        heading="sec",
        cell=lambda row: format_number(row.seconds, 1),
        meaning="seconds of a trial",
        left_out=1,
    ),
)


def terminal_table(rows: Sequence[LeaderboardRow], width: int, color: bool) -> str:
    """Returns the leaderboard as text, a table per comparison, then what columns mean.

    Lines have at most `width` characters, with `color` or without.
    """
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
        console.print(Text(_printable(", ".join(filter(None, _describe_shared(members)))), "dim"))
        console.print(_fitting(members, console))
        if claims := _claims(members):
            console.print(Text(_printable(f"{_CLAIM}: {claims}"), "dim"))
    if rows:
        console.print(Text(_legend(rows), "dim"))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _legend(rows: Sequence[LeaderboardRow]) -> str:
    sentences = [
        "▸: strongest attack on a defense (undefended first), of those that do better than on "
        "another update",
        *(f"{column.heading}: {column.meaning}" for column in _filled_columns(rows)),
        f"[low, high]: Student's interval (three trials or more, not all equal), "
        f"{population_of(rows)}",
    ]
    if any(row.masked for row in rows):
        sentences.append(
            "masked: on a client's part of a secure sum, as if it were an update; aggregate: on "
            "the sum"
        )
    if any(not row.n_ok for row in rows):
        sentences.append("–: where all trials failed, their figures are the guess's")
    return f"{'. '.join(sentences)}. More columns: report.html, or --format json or csv."


def _filled_columns(rows: Sequence[LeaderboardRow]) -> list[_Column]:
    """Returns the columns that have a value in some row."""
    return [column for column in _COLUMNS if any(column.cell(row) != ABSENT for row in rows)]


def _fitting(rows: Sequence[LeaderboardRow], console: Console) -> Table:
    """Returns the table with all columns or, of a narrow terminal, with those that have room."""
    from rich.measure import Measurement

    whole = console.options.update(width=1 << 12)
    for step in sorted({column.left_out for column in _COLUMNS}):
        table = _grid(rows, step)
        if Measurement.get(console, whole, table).maximum <= console.width:
            break
    return table


def _grid(rows: Sequence[LeaderboardRow], step: int) -> Table:
    """Returns the table of `rows` without the columns that leave it up to `step`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    cells: list[Callable[[LeaderboardRow], str]] = []
    for heading in ("defense", "attack"):
        grid.add_column(heading, overflow="fold")
    for column in _filled_columns(rows):
        short = 0 < column.left_out <= step
        if short and column.short is None:
            continue
        grid.add_column(column.heading, justify="right", no_wrap=True)
        cells.append(column.short if short and column.short else column.cell)
    varying = _varying(rows)
    for index, row in enumerate(rows):
        first = index == 0 or row.defense != rows[index - 1].defense
        if first and index:
            grid.add_section()
        mark = "▸" if row.strongest else " "
        attack = " ".join([mark, row.attack, *_malicious(row), *_own_cases(row, varying)])
        texts = [row.defense if first else "", attack, *(cell(row) for cell in cells)]
        grid.add_row(*(Text(_printable(each), "bold" if row.strongest else "") for each in texts))
    return grid


def _from_here(folder: str) -> str:
    """Returns the path of `folder` from the working directory, if it lies below that."""
    path, working_directory = Path(folder), Path.cwd()
    return str(
        path.relative_to(working_directory) if path.is_relative_to(working_directory) else path
    )


def _describe_shared(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Words what all rows have in common, and the test sets behind their accuracies."""
    tests = {(row.accuracy.examples, row.accuracy.chance) for row in rows if row.accuracy}
    accuracies = [
        f"accuracy on {number_of(n, 'test example')} (chance {chance:.0%})"
        for n, chance in sorted(tests)
    ]
    same = [name for name in _cases_of(rows) if name not in _varying(rows)]
    return [", ".join(_cases(rows[0], same)).replace("=", " "), *accuracies]


def _claims(rows: Sequence[LeaderboardRow]) -> str:
    """Words each defense's claim; empty without any."""
    claims = {
        row.defense: format_claim(row.epsilon, row.delta, row.unit, row.relation) for row in rows
    }
    return "; ".join(f"{defense} {claim}" for defense, claim in claims.items() if claim != ABSENT)


def _varying(rows: Sequence[LeaderboardRow]) -> list[str]:
    return [name for name in _cases_of(rows) if len({_case(row, name) for row in rows}) > 1]


def _cases_of(rows: Sequence[LeaderboardRow]) -> list[str]:
    main = rows[0].main
    columns = ["vantage", "server"] if main.pictured else ["vantage"]
    return [*columns, *Grant.meanings(main.noun), "round"]


def _case(row: LeaderboardRow, name: str) -> Any:
    return getattr(row.knowledge if name in Grant.model_fields else row, name)


def _cases(row: LeaderboardRow, names: Sequence[str]) -> list[str]:
    return [f"{name}={_case(row, name)}" for name in names]


def _own_cases(row: LeaderboardRow, varying: Sequence[str]) -> list[str]:
    """Words what sets a row apart; the server's vantage is the usual one and is not named."""
    sight = [row.sight] if row.sight and (row.masked or "vantage" in varying) else []
    return sight + _cases(row, [name for name in varying if name != "vantage"])


def _malicious(row: LeaderboardRow) -> list[str]:
    """Words what a malicious server has done, in each of its rows: none may be quoted without."""
    return [] if row.server == "honest" else [f"({row.server})"]


def _printable(text: str) -> str:
    """Replaces control characters: a name in a row must not drive the reader's terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
