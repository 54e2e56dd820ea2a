"""The leaderboard as a terminal table, as JSON, and as CSV. All three say whether it is valid."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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
    format_number,
    format_signed,
    format_summary,
)
from fedsim.report.leaderboard import AGGREGATED, LeaderboardRow
from fedsim.scoring import Share, Summary

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
    for name in AGGREGATED:
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


_COLUMNS: list[tuple[str, Cell]] = [
    # Heading and cell; a column without any value is left out.
    ("images", lambda row: "–" if row.images is None else str(row.images)),
    ("PSNR dB", lambda row: format_summary(row.metrics["psnr"])),
    ("max", lambda row: format_number(row.worst["psnr"], 1)),
    ("gain", lambda row: _signed(row.gain)),
    ("≥3 dB", lambda row: _share(row.leaking)),
    ("other", lambda row: _mean(row.other_update, 1)),
    ("SSIM", lambda row: _mean(row.metrics["ssim"], 2)),
    ("LPIPS", lambda row: _mean(row.metrics["lpips"], 2)),
    ("feat", lambda row: _mean(row.metrics["feature_cosine"], 2)),
    ("span", lambda row: _mean(row.metrics["subspace_error"], 3)),
    ("row err", lambda row: _mean(row.metrics["row_error"], 3)),
    ("found", lambda row: _percent(row.metrics["rows_recovered"])),
    ("AUC", lambda row: format_summary(row.metrics["membership_auc"], 2)),
    ("≤", lambda row: _limit(row)),
    ("TPR", lambda row: _percent(row.metrics["membership_tpr"])),
    ("label", lambda row: _percent(row.metrics["label_accuracy"])),
    ("no control", lambda row: (row.no_control or "–").removeprefix("no control: ")),
    ("acc", lambda row: format_accuracy(row.test_accuracy, row.accuracy)),
    (
        "ε (δ, unit, neighbours)",
        lambda row: format_claim(row.epsilon, row.delta, row.unit, row.relation),
    ),
    ("sec", lambda row: format_number(row.seconds, 1)),
]

_EXPENDABLE = (
    *(
        "sec",
        "images",
        "max",
        "other",
        "LPIPS",
        "SSIM",
        "TPR",
        "found",
        "acc",
        "label",
        "≥3 dB",
        "gain",
        "feat",
    ),
    *("span", "row err", "≤", "ε (δ, unit, neighbours)"),
)
"""Dropped in this order where the table would not fit; JSON and CSV always hold everything."""

_LEGEND = (
    "▸ strongest attack on a defense (undefended first), of those that do better than on another "
    "update. B batch size, ok trials that succeeded of all; failed ones count as guessing. PSNR "
    "mean and Student's interval (three trials or more, not all equal), max the worst trial or "
    "image; gain: dB above the best guess of someone who saw no update; ≥3 dB: trials that gain "
    "so much, and over another update, with the exact interval of that chance; other: PSNR of the "
    "same attack on another update; no control: why there is none. acc: test accuracy and Wilson's "
    "interval, ! "
    "if no better than chance."
)

_LEGEND_OF_ROWS = (
    "▸ strongest attack on a defense (undefended first), of those that do better than on another "
    "release. B rows in a release, on average; ok "
    "trials that succeeded of all; failed ones count as guessing. PSNR mean and Student's "
    "interval, of entries on their declared range; gain: dB above guessing the mean of the other "
    "rows; row err: squared error over squared length; found: rows with every entry within 5% of "
    "its range. AUC of membership, and ≤ the most that ε and δ allow of it; TPR at 5% false "
    "positives."
)
_LEGENDS = {"images": _LEGEND, "rows": _LEGEND_OF_ROWS}


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
    for comparison in dict.fromkeys(row.comparison for row in rows):
        members = [row for row in rows if row.comparison == comparison]
        console.print()
        title = Text("INVALID  " if comparison in invalid else "", "bold red")
        console.print(title.append(_printable(describe_comparison(comparison)), "bold"))
        if comparison in invalid:
            console.print(Text(f"INVALID: {_printable(invalid[comparison])}", "bold red"))
        for problem in warnings(members):
            console.print(Text(f"WARNING: {_printable(problem)}", "yellow"))
        console.print(Text(_printable(", ".join(filter(None, _shared(members)))), "dim"))
        console.print(_grid(members, width))
    for subject in dict.fromkeys(row.subject for row in rows):
        console.print(Text(_LEGENDS[subject], "dim"))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _shared(rows: Sequence[LeaderboardRow]) -> list[str]:
    """What all rows have in common, and what their accuracies are to be read beside."""
    tests = {(row.accuracy.examples, row.accuracy.chance) for row in rows if row.accuracy}
    of = [f"accuracy on {n} test examples (chance {chance:.0%})" for n, chance in sorted(tests)]
    return [_common(rows), *of]


def _grid(rows: Sequence[LeaderboardRow], width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

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
    columns = fixed + _fitting(rows, width - _width(fixed))
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
    columns = [[heading, *(cell(row) for row in rows)] for heading, cell in _COLUMNS]
    columns = [column for column in columns if any(cell != "–" for cell in column[1:])]
    for heading in _EXPENDABLE:
        if _width(columns) > width:
            columns = [column for column in columns if column[0] != heading]
    return columns


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


def _mean(summary: Summary | None, digits: int) -> str:
    return "–" if summary is None else f"{summary.mean:.{digits}f}"


def _limit(row: LeaderboardRow) -> str:
    """The most that the privacy claim allows of the area under the membership curve."""
    return format_number(row.membership_auc_limit if row.metrics["membership_auc"] else None, 2)


def _percent(summary: Summary | None) -> str:
    return "–" if summary is None else f"{summary.mean:.0%}"


def _printable(text: str) -> str:
    """Without control characters: a name in a row must not drive the reader's terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
