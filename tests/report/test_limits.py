"""Limits that runs keep to or not, and runs that leak more than others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, Stack, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import leaderboard_rows
from fedsim.report.limits import broken_limits, grown
from fedsim.results.reading import ReportError

CHOSEN = {name: STACKS[name] for name in ("none", "pruning", "dp")}


def written(folder: Path, **changes: Stack) -> Path:
    return write_run(folder, stacks={**CHOSEN, **changes}, trials=3, batch_sizes=(1,), rounds=3)


def weaker(stack: Stack, through: float, epsilon: float | None = None) -> Stack:
    return Stack(stack.members, through, stack.accuracy, epsilon or stack.epsilon)


def test_limits_hold_of_defended_stacks_or_of_those_that_are_named(run_folder: Path) -> None:
    broken = broken_limits([run_folder], max_psnr=5.0)
    assert {line.partition(",")[0] for line in broken} == {"pruning", "dp"}
    assert all("dB, above 5" in line for line in broken)
    named = broken_limits([run_folder], max_psnr=5.0, defenses=["none"])
    assert {line.partition(",")[0] for line in named} == {"none"}
    assert broken_limits([run_folder], max_psnr=90.0) == []


def test_the_upper_end_of_the_gain_counts(run_folder: Path) -> None:
    """A limit between the mean and the end of its interval is broken."""
    row = next(
        each
        for each in leaderboard_rows([run_folder])
        if each.defense == "pruning" and each.own_gain and each.own_gain.high is not None
    )
    assert row.own_gain and row.own_gain.high is not None
    between = (row.own_gain.mean + row.own_gain.high) / 2
    named = f"pruning, {row.attack}, batch size {row.batch_size}, "
    for limit, is_broken in ((between, True), (row.own_gain.high + 0.1, False)):
        lines = broken_limits([run_folder], max_gain=limit, defenses=["pruning"])
        assert any(line.startswith(named) and "(up to +" in line for line in lines) == is_broken
    assert broken_limits([run_folder], max_gain=60.0) == []


@pytest.mark.parametrize(
    ("trials", "reach"), [(1, "one trial, no interval"), (2, "2 trials, no interval, the best +")]
)
def test_too_few_trials_have_no_upper_end(tmp_path: Path, trials: int, reach: str) -> None:
    run = write_run(tmp_path, stacks=CHOSEN, trials=trials, batch_sizes=(1,))
    (line, *_) = broken_limits([run], max_gain=1.0, defenses=["none"])
    assert f" dB ({reach}" in line and "up to" not in line


def test_what_is_not_proven_is_above_any_limit(run_folder: Path) -> None:
    broken = broken_limits([run_folder], max_epsilon=8.0)
    assert len(broken) == 1 and broken[0].startswith("pruning: ε is inf")
    (dp,) = broken_limits([run_folder], max_epsilon=7.8, defenses=["dp"])
    assert dp == "dp: ε is 7.82, above 7.8"


def test_a_table_without_a_control_keeps_to_no_limit_of_leakage(tmp_path: Path) -> None:
    write_run(tmp_path, stacks=CHOSEN, trials=3, batch_sizes=(1,), undefended=0.01)
    assert any(line.startswith("INVALID: ") for line in broken_limits([tmp_path], max_psnr=90.0))
    assert broken_limits([tmp_path], max_epsilon=8.0, defenses=["dp"]) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no limit is given"),
        ({"max_psnr": 1.0, "defenses": ["pruningg"]}, "--defense: pruningg is none of these"),
    ],
)
def test_checks_of_nothing_are_refused(
    run_folder: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ReportError, match=message):
        broken_limits([run_folder], **given)  # type: ignore[arg-type]


def test_only_undefended_stacks_are_no_subject(tmp_path: Path) -> None:
    write_run(tmp_path, stacks={"none": STACKS["none"]}, trials=3, batch_sizes=(1,))
    with pytest.raises(ReportError, match="no defended stack"):
        broken_limits([tmp_path], max_psnr=1.0)


def test_a_run_that_leaks_more_than_before(tmp_path: Path) -> None:
    before = written(tmp_path / "before")
    assert grown(before, written(tmp_path / "same")) == []
    leakier = written(tmp_path / "leakier", pruning=weaker(STACKS["pruning"], 0.95))
    lines = grown(before, leakier)
    assert lines and all(line.startswith("pruning, ") for line in lines)
    assert "before" in lines[0]
    assert grown(leakier, before) == []


def test_a_larger_epsilon_and_what_is_gone_are_told(tmp_path: Path) -> None:
    before = written(tmp_path / "before")
    weaker_claim = written(tmp_path / "weaker", dp=weaker(STACKS["dp"], 0.12, 9.5))
    assert grown(before, weaker_claim) == ["dp: ε 9.5, before 7.82"]
    fewer = write_run(
        tmp_path / "fewer",
        stacks={name: CHOSEN[name] for name in ("none", "dp")},
        trials=3,
        batch_sizes=(1,),
        rounds=3,
    )
    gone = grown(before, fewer)
    assert gone and all("pruning" in line and "not measured any more" in line for line in gone)
    other = write_run(tmp_path / "other", trials=3, batch_sizes=(2,), rounds=3)
    with pytest.raises(ReportError, match="no attack on a defense in common"):
        grown(before, other)


def altered(run: Path, change: Callable[[dict[str, Any]], bool | None]) -> Path:
    """Changes the lines of a run's results; a line for which `change` returns False is removed."""
    path = run / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if change(row) is not False]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return run


def leak(row: dict[str, Any]) -> None:
    """An attack that gets 40 dB more."""
    if row["defense"]["name"] == "dp" and row["metrics"]["psnr"] is not None:
        row["metrics"]["psnr"] += 40


def failed(row: dict[str, Any]) -> None:
    if row["defense"]["name"] == "dp":
        row |= {"status": "failed", "reason": "broken", "metrics": None, "control": None}
        row["per_image"] = None


def labels_alone(row: dict[str, Any]) -> bool:
    return row["defense"]["name"] != "dp" or row["attack"]["label"] == "label_inference"


@pytest.mark.parametrize("limit", ["max_psnr", "max_gain", "max_epsilon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_limit_that_nothing_is_above_is_refused(
    limit: str, value: float, run_folder: Path
) -> None:
    with pytest.raises(ReportError, match=f"{limit.replace('_', '-')}: expected a finite number"):
        broken_limits([run_folder], **{limit: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [failed, labels_alone])
def test_what_no_attack_measured_keeps_to_no_limit(
    change: Callable[[dict[str, Any]], bool | None], tmp_path: Path
) -> None:
    run = altered(written(tmp_path), change)
    for limit, what in (("max_psnr", "PSNR"), ("max_gain", "gain")):
        (line,) = broken_limits([run], **{limit: 90.0}, defenses=["dp"])  # type: ignore[arg-type]
        assert line.startswith("dp (") and f"has a {what}" in line
        assert broken_limits([run], **{limit: 90.0}, defenses=["pruning"]) == []  # type: ignore[arg-type]


def test_an_epsilon_that_no_line_states_is_above_any_limit(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / "rounds.jsonl").unlink()
    (line,) = broken_limits([run], max_epsilon=100.0, defenses=["dp"])
    assert line.startswith("dp: no line of rounds.jsonl states its ε")


def test_each_seed_has_to_keep_to_the_limit_of_epsilon(tmp_path: Path) -> None:
    for seed in (1, 2):
        written(tmp_path / str(seed))
    path = tmp_path / "2" / "rounds.jsonl"
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rounds:
        row |= {"epsilon": None, "privacy": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rounds))
    assert broken_limits([tmp_path], max_epsilon=8.0, defenses=["dp"]) == ["dp: ε is inf, above 8"]


def test_a_run_that_waits_for_its_truth_keeps_to_no_limit(tmp_path: Path) -> None:
    run = altered(written(tmp_path), lambda row: row.update(status="unscored", metrics=None))
    assert any(line.startswith("UNSCORED: ") for line in broken_limits([run], max_psnr=90.0))


@pytest.mark.parametrize("grown_member", ["eval", "train"])
def test_every_member_of_a_sweep_is_compared_with_its_own(
    grown_member: str, tmp_path: Path
) -> None:
    for sweep in ("before", "after"):
        for mode in ("eval", "train"):
            write_run(
                tmp_path / sweep / mode,
                stacks=CHOSEN,
                trials=3,
                batch_sizes=(1,),
                rounds=3,
                variant={"training.mode": mode},
            )
    altered(tmp_path / "after" / grown_member, leak)
    lines = grown(tmp_path / "before", tmp_path / "after")
    assert lines and all(f"training.mode={grown_member}: gain" in line for line in lines)


def test_each_threat_model_is_compared_with_its_own(tmp_path: Path) -> None:
    """Rows of attackers that know labels neither hide nor stand for those of others."""

    def twice(folder: Path, weaker_leaks: bool) -> Path:
        run, other = written(folder), written(folder.with_name(f"{folder.name}-known"))
        altered(other, lambda row: row["knowledge"].update(labels="known"))
        altered(other, leak)
        if weaker_leaks:
            altered(run, leak)
        lines = [path.joinpath("results.jsonl").read_text() for path in (run, other)]
        (run / "results.jsonl").write_text("".join(lines))
        return run

    before = twice(tmp_path / "before", weaker_leaks=False)
    after = twice(tmp_path / "after", weaker_leaks=True)
    assert any(line.startswith("dp, ") for line in grown(before, after))


def test_an_attack_that_fails_now_is_told(tmp_path: Path) -> None:
    before, after = written(tmp_path / "before"), altered(written(tmp_path / "after"), failed)
    lines = grown(before, after)
    assert lines and all("dp" in line and "not measured any more" in line for line in lines)


def test_the_status_says_it(run_folder: Path) -> None:
    def status(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    folder = str(run_folder)
    assert status("check", folder, "--max-psnr", "90") == (0, "all limits are kept\n")
    code, said = status("check", folder, "--max-epsilon", "1", "--defense", "dp")
    assert (code, said) == (1, "dp: ε is 7.82, above 1\n")
    assert status("check", folder)[0] == 2
    assert status("check", folder, "--max-psnr", "nan")[0] == 2
    assert status("compare", folder, folder)[0] == 0
