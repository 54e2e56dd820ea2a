"""Writes the leaderboard as a terminal table, as JSON and as CSV; all three say if it is valid."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from fedsim.contracts.grant import Grant
from fedsim.contracts.target import ranking_targets
from fedsim.report.facts import Awaited
from fedsim.report.judge import Control, Judgement, dump, judgements
from fedsim.report.messages import (
    describe_control,
    invalid_comparisons,
    invalid_reasons,
    sentence,
    warnings,
)
from fedsim.report.row import LeaderboardRow
from fedsim.report.table import terminal_table
from fedsim.scoring import METRICS, Summary

Format = Literal["table", "json", "csv"]

_FORMULA = tuple("=+-@\t\r\n＝＋－＠")
"""First characters of a spreadsheet's formula; `board/script/exports.js` has the same."""


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
    """Returns the leaderboard `rows` as text.

    Args:
        rows: of the leaderboard.
        format: of the text.
        width: of a table, in characters.
        color: whether a table has ANSI codes.
        awaited: why no row is there yet; None if there are some, or never will be.
        unfinished: of JSON, a line for each run that has not ended, or is not scored to its end.
        judged: of JSON, the judgement of each comparison; by default of the rows alone.
    """
    if format == "json":
        return _json(rows, awaited, unfinished, judgements(rows) if judged is None else judged)
    if format == "csv":
        return _csv(rows, awaited)
    if awaited:
        return f"{awaited.mark}: no attack is scored yet\n"
    return terminal_table(rows, width, color)


def _reasons(rows: Sequence[LeaderboardRow], awaited: Awaited | None) -> list[str]:
    """Returns why nothing follows from the rows; of a run that waits, what it waits for."""
    return [awaited.reason] if awaited else invalid_reasons(rows)


def _json(
    rows: Sequence[LeaderboardRow],
    awaited: Awaited | None,
    unfinished: Sequence[str],
    judged: Sequence[Judgement],
) -> str:
    reasons, invalid = _reasons(rows, awaited), invalid_comparisons(rows)
    document = {
        "valid": not reasons,
        "invalid_reasons": reasons,
        "unfinished": list(unfinished),
        "warnings": warnings(rows),
        "positive_controls": [_control(each.control) for each in judged],
        "judgements": [_judgement(each) for each in judged],
        "rows": [{**_validity(row, invalid), **_fields(row)} for row in rows],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _control(control: Control) -> dict[str, Any]:
    *where, threat, watcher = control.comparison
    return {
        "comparison": [*where, threat.title, watcher],
        "status": control.status,
        "reason": describe_control(control),
    }


def _judgement(judged: Judgement) -> dict[str, Any]:
    """Returns a judgement as plain values, and each verdict in words, too."""
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

_BOUNDED = ("membership_auc", "membership_tpr")

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
    """Returns whether the comparison of `row` is valid, and what to know of its model."""
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
    *("claimed_epsilon", "audited_epsilon", "seconds"),
)
"""Columns before and behind those of metrics."""


def _flat(row: LeaderboardRow) -> dict[str, Any]:
    """Returns the fields of a row, each summary as several columns."""
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
