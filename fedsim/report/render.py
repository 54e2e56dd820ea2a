"""Writes the leaderboard as a terminal table, as JSON and as CSV; all three say if it is valid."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsim.contracts.grant import Grant
from fedsim.contracts.target import ranking_targets
from fedsim.report.facts import Awaited
from fedsim.report.figures import format_accuracy, format_number, read_texts
from fedsim.report.judge import Judgement, dump, judgements, positive_controls
from fedsim.report.messages import (
    describe_control,
    invalid_comparisons,
    invalid_reasons,
    sentence,
    warnings,
)
from fedsim.report.row import ABSENT, LeaderboardRow, heading_of, measure_row, population_of
from fedsim.report.threat import describe_comparison
from fedsim.scoring import METRICS, Summary
from fedsim.words import format_claim, format_epsilon, number_of, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_CLAIM = "ε (δ, unit, neighbours)"


@dataclass(frozen=True)
class _Column:
    """A column of the table; `texts.yaml` says what it means."""

    heading: str
    cell: Callable[[LeaderboardRow], str]
    left_out: int = 0  # order in which columns leave a table that is too wide; 0: never
    short: Callable[[LeaderboardRow], str] | None = None
    """A narrower cell, which then takes its place."""


def _value(row: LeaderboardRow) -> str:
    found = measure_row(row, row.ranked_by)
    return ABSENT if found.value == ABSENT else found.words


def _mean(row: LeaderboardRow) -> str:
    metric, summary = METRICS[row.ranked_by], row.metrics[row.ranked_by]
    if not row.n_ok or summary is None:
        return ABSENT
    return f"{heading_of(metric)} {format_number(summary.mean, metric.digits)}"


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
    _Column("B", lambda row: str(row.batch_size)),
    _Column("ok", lambda row: f"{row.n_ok}/{row.n}"),
    _Column("found", _value, 4, _mean),
    _Column("gain", lambda row: measure_row(row, row.ranked_by).above.partition(" ")[0]),
    _Column("other", _above_other, 3),
    _Column("≥3 dB", _share, 2),
    _Column("certified", _format_certified),
    _Column("acc", _accuracy, 5, lambda row: _accuracy(row).partition(" ")[0]),
    _Column("ε", lambda row: format_epsilon(row.epsilon)),
    _Column("sec", lambda row: format_number(row.seconds, 1), 1),
)


def _terminal_table(rows: Sequence[LeaderboardRow], width: int, color: bool) -> str:
    """Returns the leaderboard as text of `width` characters, a table per comparison."""
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
        name = printable(describe_comparison(comparison, comparisons))
        console.print(title.append(name, "bold"))
        if members[0].variant:
            here = Path.cwd()
            for path in dict.fromkeys(Path(path) for row in members for path in row.folders):
                near = path.relative_to(here) if path.is_relative_to(here) else path
                console.print(Text(f"in {printable(str(near))}", "dim"), soft_wrap=True)
        if marks[comparison] == "INVALID":
            console.print(Text(f"INVALID: {printable(invalid[comparison])}", "bold red"))
        for problem in warnings(members):
            console.print(Text(f"WARNING: {printable(problem)}", "yellow"))
        console.print(Text(printable(", ".join(filter(None, _describe_shared(members)))), "dim"))
        console.print(_fitting(members, console))
        if claims := _claims(members):
            console.print(Text(printable(f"{_CLAIM}: {claims}"), "dim"))
    if rows:
        console.print(Text(_legend(rows), "dim"))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _legend(rows: Sequence[LeaderboardRow]) -> str:
    texts = read_texts()["table"]
    columns = (each.heading for each in _filled_columns(rows))
    sentences = [
        texts["strongest"],
        *(f"{heading}: {texts['columns'][heading]}" for heading in columns),
        texts["interval"].format(population=population_of(rows)),
        *[texts["masked"]] * any(row.masked for row in rows),
        *[texts["failed"]] * any(not row.n_ok for row in rows),
    ]
    return f"{'. '.join(sentences)}. {texts['more']}"


def _filled_columns(rows: Sequence[LeaderboardRow]) -> list[_Column]:
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
        # No row of a malicious server may be quoted without what that has done.
        done = [] if row.server == "honest" else [f"({row.server})"]
        attack = " ".join([mark, row.attack, *done, *_own_cases(row, varying)])
        texts = [row.defense if first else "", attack, *(cell(row) for cell in cells)]
        grid.add_row(*(Text(printable(each), "bold" if row.strongest else "") for each in texts))
    return grid


def _describe_shared(rows: Sequence[LeaderboardRow]) -> list[str]:
    tests = {(row.accuracy.examples, row.accuracy.chance) for row in rows if row.accuracy}
    accuracies = [
        f"accuracy on {number_of(n, 'test example')} (chance {chance:.0%})"
        for n, chance in sorted(tests)
    ]
    varying = _varying(rows)
    same = [f"{name} {value}" for name, value in _cases(rows[0]).items() if name not in varying]
    return [", ".join(same), *accuracies]


def _claims(rows: Sequence[LeaderboardRow]) -> str:
    claims = {
        row.defense: format_claim(row.epsilon, row.delta, row.unit, row.relation) for row in rows
    }
    return "; ".join(f"{defense} {claim}" for defense, claim in claims.items() if claim != ABSENT)


def _cases(row: LeaderboardRow) -> dict[str, Any]:
    columns = ["vantage", *["server"] * row.main.pictured]
    names = [*columns, *Grant.meanings(row.main.noun), "round"]
    fields = Grant.model_fields
    return {name: getattr(row.knowledge if name in fields else row, name) for name in names}


def _varying(rows: Sequence[LeaderboardRow]) -> set[str]:
    first, *others = map(_cases, rows)
    return {name for name in first if any(each[name] != first[name] for each in others)}


def _own_cases(row: LeaderboardRow, varying: set[str]) -> list[str]:
    """Words what sets a row apart; the server's vantage is the usual one and is not named."""
    sight = [row.sight] if row.sight and (row.masked or "vantage" in varying) else []
    own = _cases(row).items()
    return sight + [f"{name}={value}" for name, value in own if name in varying - {"vantage"}]


Format = Literal["table", "json", "csv"]

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")


def render(
    rows: Sequence[LeaderboardRow],
    format: Format = "table",
    *,
    width: int = 100,
    color: bool = False,
    awaited: Awaited | None = None,
    unfinished: Sequence[str] = (),
    judged: Sequence[Judgement] | None = None,
) -> str:
    """Returns the leaderboard `rows` as text that ends in a newline.

    Args:
        rows: Rows of the leaderboard.
        format: Format of the text; whatever is neither `json` nor `csv` gives a table.
        width: Width of a table, in characters.
        color: Whether a table has ANSI codes.
        awaited: Why no row is there yet; None if there are some, or never will be.
        unfinished: Lines (JSON alone) on runs that have not ended, or are not scored to their end.
        judged: Judgement (JSON alone) of each comparison; None for that of the rows alone.
    """
    if format == "json":
        return _json(rows, awaited, unfinished, judgements(rows) if judged is None else judged)
    if format == "csv":
        return _csv(rows, awaited)
    if awaited:
        return f"{awaited.mark}: no attack is scored yet\n"
    return _terminal_table(rows, width, color)


def _reasons(rows: Sequence[LeaderboardRow], awaited: Awaited | None) -> list[str]:
    return [awaited.reason] if awaited else invalid_reasons(rows)


def _json(
    rows: Sequence[LeaderboardRow],
    awaited: Awaited | None,
    unfinished: Sequence[str],
    judged: Sequence[Judgement],
) -> str:
    reasons, invalid = _reasons(rows, awaited), invalid_comparisons(rows)
    documents = [_judgement(each) for each in judged]
    document = {
        "valid": not reasons,
        "invalid_reasons": reasons,
        "unfinished": list(unfinished),
        "warnings": warnings(rows),
        "positive_controls": [
            {
                "comparison": plain["comparison"],
                "status": each.control.status,
                "reason": describe_control(each.control),
            }
            for plain, each in zip(documents, judged, strict=True)
        ],
        "judgements": documents,
        "rows": [{**_validity(row, invalid), **_fields(row)} for row in rows],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _judgement(judged: Judgement) -> dict[str, Any]:
    document = dump(judged)
    for plain, verdict in zip(document["verdicts"], judged.verdicts, strict=True):
        plain["sentence"] = sentence(verdict)
    return document


def _fields(row: LeaderboardRow) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name == "threat":
            fields |= {"threat_model": row.threat.title, "server": row.server}
        elif name == "knowledge":
            # Grants that this version does not know are named by the threat model.
            fields |= {grant: getattr(row.knowledge, grant) for grant in Grant.model_fields}
        elif name not in _BY_METRIC:
            fields[name] = value
    for name, summary in _summaries(row).items():
        fields[name] = summary and asdict(summary)
    fields["likeness"] = {name: asdict(likeness) for name, likeness in row.likeness.items()}
    fields |= {f"{name}_limit": row.limits.get(name) for name in _BOUNDED}
    del fields["cell"]  # repeats the others
    return {**fields, "epsilon": "inf" if row.epsilon == math.inf else row.epsilon}


_BY_METRIC = ("gains", "own_gains", "others", "over_others", "limits")
"""Fields of a row that hold something for each metric; of those that rank it is told by name."""

_BOUNDED = (
    "membership_auc",
    "membership_tpr",
    "membership_tpr_at_1_percent",
    "membership_tpr_at_01_percent",
    "psnr",
    "feature_cosine",
)

_RANKING = {"psnr": "", "subspace_error": "span_", "label_accuracy": "label_"}
"""Metric -> how names begin of what is told of it; of others with their own names."""


def _summaries(row: LeaderboardRow) -> dict[str, Summary | None]:
    """Returns what is told of each metric that ranks attacks, by the names of the formats."""
    told: dict[str, Summary | None] = {
        "other_update": row.others.get("psnr"),
        "own_gain": row.own_gain,
    }
    for name in ranking_targets():
        begin = _RANKING.get(name, "membership_" if name == "membership_auc" else f"{name}_")
        told[f"{begin}over_other"] = row.over_others.get(name)
        if name != "subspace_error":
            told[f"{begin}gain"] = row.gains.get(name)
    return told


def _validity(row: LeaderboardRow, invalid: Mapping[Any, str]) -> dict[str, Any]:
    return {
        "valid": row.comparison not in invalid,
        "invalid_reason": invalid.get(row.comparison, ""),
        "warning": " | ".join(row.warnings),
    }


def _csv(rows: Sequence[LeaderboardRow], awaited: Awaited | None) -> str:
    invalid = invalid_comparisons(rows)
    text = io.StringIO()
    records = [{**_validity(row, invalid), **_flat(row)} for row in rows]
    # Without rows there is still the verdict.
    records = records or [{"valid": False, "invalid_reason": " | ".join(_reasons(rows, awaited))}]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _inert(value) for key, value in row.items()} for row in records)
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Returns `value` as a spreadsheet neither runs it nor reads a new row in it."""
    if not isinstance(value, str):
        return value
    # Python's writer puts no quotes around a carriage return.
    return ("'" if value.startswith(_FORMULA) else "") + value.replace("\r", " ")


_FIRST = (
    *("scenario", "variant", "folders", "dataset", "model", "defense", "stack", "attack"),
    *("strongest", "vantage", "masked", "threat_model", "server", *Grant.model_fields),
    *("batch_size", "round", "n_ok", "n", "images", "independent"),
)
_LAST = (
    *("no_control", "guess_public", "guess_public_per_image"),
    *("train_loss", "test_loss", "test_accuracy"),
    *("test_accuracy_low", "test_accuracy_high", "test_examples", "test_chance"),
    *("epsilon", "delta", "accountant", "unit", "relation", "privacy_reason", "privacy_covers"),
    *("claimed_epsilon", "audited_epsilon", "membership_p", "seconds"),
)
"""Columns before and behind those of metrics."""


def _flat(row: LeaderboardRow) -> dict[str, Any]:
    fields, tested = _fields(row), row.accuracy
    fields |= {
        "folders": " | ".join(row.folders),
        "test_accuracy_low": tested and tested.low,
        "test_accuracy_high": tested and tested.high,
        "test_examples": tested and tested.examples,
        "test_chance": tested and tested.chance,
    }
    flat = {name: fields[name] for name in _FIRST}
    for name in METRICS:
        flat |= _columns(name, row.metrics[name])
        flat[f"{name}_worst"] = row.worst[name]
        flat[f"{name}_baseline"] = row.baseline[name]
    for name, summary in _summaries(row).items():
        flat |= _columns("other_update_psnr" if name == "other_update" else name, summary)
    flat |= {f"{name}_limit": row.limits.get(name) for name in _BOUNDED}
    for name, parts in _PARTS.items():
        value = getattr(row, name)
        flat |= {f"{name}_{part}": value and getattr(value, part) for part in parts}
    return flat | {name: fields[name] for name in _LAST}


_PARTS = {
    "leaking": ("count", "n", "low", "high"),
    "certificates": ("images", "determined", "certified", "false"),
}


def _columns(name: str, summary: Summary | None) -> dict[str, float | None]:
    parts = ("mean", "low", "high", "median", "std", "min", "max")
    return {f"{name}_{part}": getattr(summary, part) if summary else None for part in parts}
