"""Run folders with all that a board shows: several views, INVALID, UNSCORED, hostile names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synthetic_run import STACKS, write_run

HOSTILE = '</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">'
QUOTES = "\"'`&<b>bold</b>"
FORMULA = "=cmd|' /C calc'!A0"
LONG = "x" * (1 << 20)

Row = dict[str, Any]


def write_runs(folder: Path) -> Path:
    """Fill `folder` with four runs."""
    stacks = {name: STACKS[name] for name in ("none", "pruning", "dp")}
    small: dict[str, Any] = {"stacks": stacks, "trials": 3, "batch_sizes": (1, 2), "rounds": 3}
    main = write_run(folder / "main", **small)
    rows = read(main)
    rewrite(main, rows + changed(rows, earlier) + changed(rows, known) + changed(rows, overheard))
    (main / "audit.jsonl").write_text(
        json.dumps({"defense": "dp", "method": "one_run", "audited_epsilon": 9.5, "holds": False})
        + "\n"
    )
    weak = {"stacks": {"none": STACKS["none"], "noise": STACKS["noise"]}, "trials": 3}
    write_run(folder / "weak", scenario="weak", undefended=0.1, **{**small, **weak})
    waiting = write_run(folder / "waiting", scenario="waiting", **{**small, "trials": 1})
    rewrite(waiting, changed(read(waiting), unscored))
    hostile = write_run(folder / "strange", scenario=HOSTILE, **{**small, "batch_sizes": (1,)})
    rewrite(hostile, changed(read(hostile), disguised))
    return folder


def read(run: Path) -> list[Row]:
    """The lines of a run's results."""
    return [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]


def rewrite(run: Path, rows: list[Row]) -> None:
    """Write the lines of a run's results again."""
    (run / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def changed(rows: list[Row], change: Callable[[Row], None]) -> list[Row]:
    """Copies of `rows`, each changed."""
    copies: list[Row] = json.loads(json.dumps(rows))
    for row in copies:
        change(row)
    return copies


def earlier(row: Row) -> None:
    """Another round, with other figures, so that a mix of both is seen."""
    row["round"] = 1
    if row["metrics"]["psnr"] is not None:
        row["metrics"]["psnr"] += 30


def known(row: Row) -> None:
    """Another threat model: labels are granted."""
    row["knowledge"] = {"labels": "known", "bn": "none"}


def overheard(row: Row) -> None:
    """Another vantage, that of an eavesdropper."""
    row["vantage"] = "eavesdropper"


def unscored(row: Row) -> None:
    """A row that waits for the truth."""
    row |= {"status": "unscored", "metrics": None, "baseline": None, "control": None}


def disguised(row: Row) -> None:
    """Names that would be markup, formulas or too long, and no picture."""
    names = {"none": HOSTILE, "pruning": QUOTES, "dp": "</td></table>" + LONG}
    row["defense"] = {**row["defense"], "name": names[row["defense"]["name"]]}
    if row["defense"]["stack"]:
        row["defense"]["stack"] = [{"name": HOSTILE, "parameters": {"key": QUOTES}}]
    labels = {"inverting_gradients": FORMULA, "deep_leakage": HOSTILE, "label_inference": QUOTES}
    row["attack"] = {**row["attack"], "label": labels[row["attack"]["label"]]}
    row["observation"] = None
    if row["status"] == "failed":
        row["reason"] = HOSTILE + LONG
