"""The leaderboard as a terminal table, as JSON, and as CSV. All three say whether it is valid."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    format_metric,
    format_number,
    format_signed,
)
from fedsim.report.leaderboard import LeaderboardRow
from fedsim.results.reading import Subject
from fedsim.scoring import COMPARABLE, METRICS, Metric, Share, Summary
from fedsim.words import number_of

if TYPE_CHECKING:
    from rich.table import Table

Format = Literal["table", "json", "csv"]

Cell = Callable[[LeaderboardRow], str]


def render(
    rows: Sequence[LeaderboardRow],
    format: Format = "table",
    *,
    width: int = 100,
    color: bool = False,
) -> str:
    """`rows` as text. `width` (characters) and `color` (ANSI codes) concern the table only."""
    if format == "json":
        return _json(rows)
    if format == "csv":
        return _csv(rows)
    return _table(rows, width, color)


def _json(rows: Sequence[LeaderboardRow]) -> str:
    reasons, invalid = invalid_reasons(rows), invalid_comparisons(rows)
    document = {
        "valid": not reasons,
        "invalid_reasons": reasons,
        "warnings": warnings(rows),
        "positive_controls": [asdict(control) for control in positive_controls(rows)],
        "rows": [{**_judged(row, invalid), **_fields(row)} for row in rows],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _fields(row: LeaderboardRow) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in asdict(row).items():
        fields |= row.knowledge.model_dump() if name == "knowledge" else {name: value}
    del fields["cell"]  # repeats the others
    return {**fields, "epsilon": _epsilon(row.epsilon)}


def _judged(row: LeaderboardRow, invalid: Mapping[Any, str]) -> dict[str, Any]:
    """Whether the comparison that `row` is part of is valid, and what its model is worth."""
    return {
        "valid": row.comparison not in invalid,
        "invalid_reason": invalid.get(row.comparison, ""),
        "warning": " | ".join(row.warnings),
    }


def _csv(rows: Sequence[LeaderboardRow]) -> str:
    invalid = invalid_comparisons(rows)
    text = io.StringIO()
    records = [{**_judged(row, invalid), **_flat(row)} for row in rows]
    # Without rows there is still the verdict.
    records = records or [{"valid": False, "invalid_reason": " | ".join(invalid_reasons(rows))}]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _flat(row: LeaderboardRow) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "scenario": row.scenario,
        "variant": row.variant,
        "folders": " | ".join(row.folders),
        "dataset": row.dataset,
        "model": row.model,
        "defense": row.defense,
        "stack": row.stack,
        "attack": row.attack,
        "strongest": row.strongest,
        "vantage": row.vantage,
        "server": row.server,
        **row.knowledge.model_dump(),
        "batch_size": row.batch_size,
        "round": row.round,
        "n_ok": row.n_ok,
        "n": row.n,
        "images": row.images,
        "independent": row.independent,
    }
    for name in COMPARABLE:
        flat |= _columns(name, row.metrics[name])
        flat[f"{name}_worst"] = row.worst[name]
        flat[f"{name}_baseline"] = row.baseline[name]
    flat |= _columns("gain", row.gain) | _columns("label_gain", row.label_gain)
    flat["membership_auc_limit"] = row.membership_auc_limit
    flat["membership_tpr_limit"] = row.membership_tpr_limit
    flat |= _columns("other_update_psnr", row.other_update) | _columns("over_other", row.over_other)
    flat |= _columns("own_gain", row.own_gain)
    for part in ("count", "n", "low", "high"):
        flat[f"leaking_{part}"] = row.leaking and getattr(row.leaking, part)
    flat |= _columns("span_over_other", row.span_over_other)
    flat |= _columns("label_over_other", row.label_over_other)
    flat |= _columns("membership_over_other", row.membership_over_other)
    flat |= {
        "no_control": row.no_control,
        "guess_public": row.guess_public,
        "guess_public_per_image": row.guess_public_per_image,
    }
    return flat | {
        "train_loss": row.train_loss,
        "test_loss": row.test_loss,
        "test_accuracy": row.test_accuracy,
        "test_accuracy_low": row.accuracy and row.accuracy.low,
        "test_accuracy_high": row.accuracy and row.accuracy.high,
        "test_examples": row.accuracy and row.accuracy.examples,
        "test_chance": row.accuracy and row.accuracy.chance,
        "epsilon": _epsilon(row.epsilon),
        "delta": row.delta,
        "accountant": row.accountant,
        "unit": row.unit,
        "relation": row.relation,
        "privacy_reason": row.privacy_reason,
        "privacy_covers": row.privacy_covers,
        "audited_epsilon": row.audited_epsilon,
        "seconds": row.seconds,
    }


def _columns(name: str, summary: Summary | None) -> dict[str, float | None]:
    parts = ("mean", "low", "high", "median", "std", "min", "max")
    return {f"{name}_{part}": getattr(summary, part) if summary else None for part in parts}


def _epsilon(epsilon: float | None) -> float | str | None:
    return "inf" if epsilon is not None and math.isinf(epsilon) else epsilon


_CLAIM = "ε (δ, unit, neighbours)"


def _metric_cell(metric: Metric) -> Cell:
    def cell(row: LeaderboardRow) -> str:
        return format_metric(row.metrics[metric.name], metric)

    return cell


_METRICS = [(metric, metric.heading) for metric in METRICS.values() if metric.heading]
_PSNR, *_OTHERS = [(heading, _metric_cell(metric)) for metric, heading in _METRICS]

_COLUMNS: list[tuple[str, Cell]] = [
    # Heading and cell; a column without any value is left out.
    ("images", lambda row: "–" if row.images is None else str(row.images)),
    _PSNR,
    ("max", lambda row: format_number(row.worst["psnr"], 1)),
    ("gain", lambda row: _signed(row.gain)),
    ("≥3 dB", lambda row: _share(row.leaking)),
    ("other", lambda row: "–" if row.other_update is None else f"{row.other_update.mean:.1f}"),
    *_OTHERS,
    ("AUC ≤", lambda row: format_number(row.limit("membership_auc"), 2)),
    ("no control", lambda row: (row.no_control or "–").removeprefix("no control: ")),
    ("acc", lambda row: format_accuracy(row.test_accuracy, row.accuracy)),
    (_CLAIM, lambda row: _claim(row)),
    ("sec", lambda row: format_number(row.seconds, 1)),
]


def _left_out(when: str) -> list[str]:
    return [heading for metric, heading in _METRICS if metric.narrow == when]


_OPTIONAL = (
    *("gain", _CLAIM, "AUC ≤", "no control", "≥3 dB", *_left_out("late"), "acc"),
    *(*_left_out("early"), "other", "max", "images", "sec"),
)
"""Columns that a narrow table lacks, the most important first; JSON and CSV hold everything."""

_LEGEND: dict[str, str] = {
    # Column -> what it holds.
    "images": "different ones in all trials",
    "max": "the worst trial or image",
    "gain": "dB above the best guess of someone who saw no update",
    "≥3 dB": "trials that gain so much, and over another update, with the exact interval of that "
    "chance",
    "other": "PSNR of the same attack on another update",
    **{heading: metric.meaning for metric, heading in _METRICS},
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
    """What the columns `shown` mean in a table of attacks on `subject`."""
    of_images = subject == "images"
    size = "batch size" if of_images else "rows in a release, on average"
    told = [
        "▸: strongest attack on a defense (undefended first), of those that do better than on "
        f"another {'update' if of_images else 'release'}",
        f"B: {size}",
        "ok: trials that succeeded of all; failed ones count as guessing",
    ]
    meanings = _LEGEND if of_images else _LEGEND | _LEGEND_OF_ROWS
    there = {*shown, *({_CLAIM} & set(_held(rows)))}
    told += [
        f"{'ε' if heading == _CLAIM else heading}: {meanings[heading]}"
        for heading, _ in _COLUMNS
        if heading in there
    ]
    summaries = [row.metrics["psnr"] for row in rows]
    if any(summary and summary.low is not None for summary in summaries):
        told.append("[low, high]: Student's interval (three trials or more, not all equal)")
    text = ". ".join(told) + "."
    if hidden := [name for name in _held(rows) if name not in shown and name != _CLAIM]:
        text += f" Too wide for this terminal: {', '.join(hidden)}; --format json and csv have all."
    return text


def _table(rows: Sequence[LeaderboardRow], width: int, color: bool) -> str:
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
    if not rows:
        console.print(Text(f"INVALID: {' '.join(invalid_reasons(rows))}", "bold red"))
    shown: dict[Subject, set[str]] = {}
    for comparison in dict.fromkeys(row.comparison for row in rows):
        members = [row for row in rows if row.comparison == comparison]
        console.print()
        title = Text("INVALID  " if comparison in invalid else "", "bold red")
        console.print(title.append(_printable(describe_comparison(comparison)), "bold"))
        if members[0].variant:
            for folder in dict.fromkeys(one for row in members for one in row.folders):
                console.print(Text(f"in {_printable(_from_here(folder))}", "dim"), soft_wrap=True)
        if comparison in invalid:
            console.print(Text(f"INVALID: {_printable(invalid[comparison])}", "bold red"))
        for problem in warnings(members):
            console.print(Text(f"WARNING: {_printable(problem)}", "yellow"))
        console.print(Text(_printable(", ".join(filter(None, _shared(members)))), "dim"))
        columns = _columns_of(members, width)
        shown.setdefault(members[0].subject, set()).update(heading for heading, *_ in columns)
        console.print(_grid(members, columns))
        if _CLAIM not in [heading for heading, *_ in columns] and (claims := _claims(members)):
            console.print(Text(_printable(f"{_CLAIM}: {claims}"), "dim"))
    for subject, headings in shown.items():
        own = [row for row in rows if row.subject == subject]
        console.print(Text(_legend(subject, own, headings), "dim"))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _from_here(folder: str) -> str:
    """The path of `folder` from the working directory, if it lies below that."""
    path, here = Path(folder), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _shared(rows: Sequence[LeaderboardRow]) -> list[str]:
    """What all rows have in common, and what their accuracies are to be read beside."""
    tests = {(row.accuracy.examples, row.accuracy.chance) for row in rows if row.accuracy}
    of = [
        f"accuracy on {number_of(n, 'test example')} (chance {chance:.0%})"
        for n, chance in sorted(tests)
    ]
    return [_common(rows), *of]


def _columns_of(rows: Sequence[LeaderboardRow], width: int) -> list[list[str]]:
    """The columns that `width` allows: a heading, then a cell for each row."""
    varying = _varying(rows)
    attacks = [
        f"{'▸' if row.strongest else ' '} "
        f"{' '.join([row.attack, *_malicious(row), *_own_cases(row, varying)])}"
        for row in rows
    ]
    fixed = [
        ["defense", *(row.defense for row in rows)],
        ["attack", *attacks],
        ["B", *(str(row.batch_size) for row in rows)],
        ["ok", *(f"{row.n_ok}/{row.n}" for row in rows)],
    ]
    return fixed + _fitting(rows, width - _width(fixed))


def _grid(rows: Sequence[LeaderboardRow], columns: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    for position, (heading, *_) in enumerate(columns):
        grid.add_column(heading, justify="right" if position > 1 else "left", overflow="fold")
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
    """Columns (heading, then a cell per row) that hold anything, as many as `width` allows."""
    held = _held(rows)
    columns = [[heading, *(cell(row) for row in rows)] for heading, cell in _COLUMNS]
    columns = [column for column in columns if column[0] in held]
    kept = [column for column in columns if column[0] not in _OPTIONAL]
    for heading in _OPTIONAL:
        kept += [c for c in columns if c[0] == heading and _width([*kept, c]) <= width]
    return [column for column in columns if column in kept]


def _held(rows: Sequence[LeaderboardRow]) -> list[str]:
    """Headings of the columns that hold anything."""
    return [heading for heading, cell in _COLUMNS if any(cell(row) != "–" for row in rows)]


def _claims(rows: Sequence[LeaderboardRow]) -> str:
    """The claim of each defense, of a table that is too narrow for their column; empty: none."""
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
    seen = ["vantage", "server"] if subject == "images" else ["vantage"]
    return [*seen, *Grant.meanings(subject), "round"]


def _case(row: LeaderboardRow, name: str) -> Any:
    return getattr(row.knowledge if name in Grant.model_fields else row, name)


def _common(rows: Sequence[LeaderboardRow]) -> str:
    """What all rows share, so that it needs no column."""
    same = [name for name in _cases_of(rows) if name not in _varying(rows)]
    return ", ".join(_cases(rows[0], same)).replace("=", " ")


def _cases(row: LeaderboardRow, names: Sequence[str]) -> list[str]:
    return [f"{name}={_case(row, name)}" for name in names]


def _own_cases(row: LeaderboardRow, varying: Sequence[str]) -> list[str]:
    """What sets a row apart; the server's vantage is the usual one and goes without saying."""
    vantage = [row.vantage] if "vantage" in varying and row.vantage != "server" else []
    return vantage + _cases(row, [name for name in varying if name != "vantage"])


def _malicious(row: LeaderboardRow) -> list[str]:
    """In every row of it, what a malicious server has done: such a row is not to be quoted bare."""
    return [] if row.server == "honest" else [f"({row.server})"]


def _share(share: Share | None) -> str:
    """`1/10 (0–45)`: trials of all, and the interval of their chance in percent."""
    if share is None:
        return "–"
    return f"{share.count}/{share.n} ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _signed(summary: Summary | None) -> str:
    return "–" if summary is None else format_signed(summary.mean)


def _printable(text: str) -> str:
    """Without control characters: a name in a row must not drive the reader's terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
