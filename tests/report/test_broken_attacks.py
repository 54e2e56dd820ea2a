"""A crash or a refusal of an attack is told as such, with its reason, and never as weakness."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, write_run

from fedsim.cli.outcome import TableFormat, leaderboard
from fedsim.report import load_runs, write_report
from fedsim.report.answers import answers_of
from fedsim.report.control import positive_controls, warnings
from fedsim.report.leaderboard import leaderboard_rows

REASON = "RuntimeError: stack expects each tensor to be equal size"
IMAGES = ("inverting_gradients", "deep_leakage")


def broken(
    folder: Path,
    attacks: Collection[str] = IMAGES,
    defenses: Collection[str] = ("none", "pruning"),
    *,
    guessed: bool = True,
    strength: float = 1.0,
) -> Path:
    """A run of which `attacks` crashed behind `defenses`, as somebody's own model makes them."""
    stacks = {name: STACKS[name] for name in ("none", "pruning")}
    write_run(
        folder, stacks=stacks, trials=3, batch_sizes=(1,), rounds=3, side=8, undefended=strength
    )
    path = folder / "results.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["attack"]["label"] in attacks and row["defense"]["name"] in defenses:
            row |= {"status": "failed", "reason": REASON, "metrics": None, "control": None}
            row["baseline"] = row["baseline"] if guessed else None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("guessed", [True, False])
@pytest.mark.parametrize("attacks", [IMAGES, (*IMAGES, "label_inference")])
def test_attacks_that_did_not_run_are_no_attacks_that_do_not_work(
    attacks: Collection[str], guessed: bool, tmp_path: Path
) -> None:
    rows = leaderboard_rows([broken(tmp_path, attacks, guessed=guessed)])
    (control,) = positive_controls(rows)
    assert (control.status, control.mark) == ("broken", "INVALID")
    assert REASON in control.reason
    assert "try more iterations" not in control.reason
    ((_, found),) = answers_of(load_runs([tmp_path]))
    for answer in found:
        assert answer.finding == "no answer"
        assert REASON in answer.reason and "do not work" not in answer.reason


def test_the_reason_is_in_the_terminal_and_on_every_page(tmp_path: Path) -> None:
    folder = broken(tmp_path)
    runs = load_runs([folder])
    terminal = " ".join(leaderboard(runs, TableFormat.table).split())
    document = json.loads(leaderboard(runs, TableFormat.json))
    report = write_report(folder).read_text(encoding="utf-8")
    for text in (terminal, report):
        assert REASON in text
    assert any(REASON in text for text in document["warnings"])
    assert document["positive_controls"][0]["status"] == "broken"
    for text in (terminal, report, json.dumps(document)):
        assert "try more iterations" not in text
        assert "attacks do not work" not in text


def test_one_that_works_makes_up_for_one_that_crashed_which_is_told(tmp_path: Path) -> None:
    rows = leaderboard_rows([broken(tmp_path, ["deep_leakage"])])
    (control,) = positive_controls(rows)
    assert control.status == "passed"
    (told,) = [line for line in warnings(rows) if REASON in line]
    assert "deep_leakage" in told and "6 of 6" in told and "none, pruning" in told


def test_a_weak_attack_is_weak_whatever_crashed_beside_it(tmp_path: Path) -> None:
    rows = leaderboard_rows([broken(tmp_path, ["deep_leakage"], strength=0.01)])
    (control,) = positive_controls(rows)
    assert control.status == "failed" and REASON in control.reason


def test_a_defense_on_which_all_crash_says_why(tmp_path: Path) -> None:
    folder = broken(tmp_path, (*IMAGES, "label_inference"), ["pruning"])
    ((_, found),) = answers_of(load_runs([folder]))
    (answer,) = [each for each in found if each.defense == "pruning"]
    assert (answer.finding, answer.verdict) == ("failed", "not shown")
    assert REASON in answer.brief
