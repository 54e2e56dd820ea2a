"""Limits that runs keep to or not, and runs that leak more than others."""

from __future__ import annotations

from pathlib import Path

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


def test_the_status_says_it(run_folder: Path) -> None:
    def status(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.output

    folder = str(run_folder)
    assert status("check", folder, "--max-psnr", "90") == (0, "all limits are kept\n")
    code, said = status("check", folder, "--max-epsilon", "1", "--defense", "dp")
    assert (code, said) == (1, "dp: ε is 7.82, above 1\n")
    assert status("check", folder)[0] == 2
    assert status("compare", folder, folder)[0] == 0
