"""The record's lines survive a kill."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedsim.results.reading import _load_plan
from fedsim.results.record import (
    PLAN,
    Plan,
    append_line,
    drop_torn_line,
    environment,
    read_lines,
    write_lines,
)
from fedsim.types import FedsimError

ROOT = Path(__file__).parents[2]


def test_lines_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"a": 1.5, "b": None}, {"a": "ü\n", "b": [1, 2]}]
    for row in rows:
        append_line(path, row)
    assert read_lines(path) == rows
    write_lines(path, reversed(rows))
    assert read_lines(path) == rows[::-1]


def test_a_line_cut_short_is_left_out_and_appended_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"n": 1})
    append_line(path, {"n": 2})
    path.write_bytes(path.read_bytes()[:-3])
    assert read_lines(path) == [{"n": 1}]
    drop_torn_line(path)
    append_line(path, {"n": 3})
    assert read_lines(path) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0\0",
        b"\xff{}",
        b"[]",
        b'{"n": ',
        b'{"m": 1}',
        b"[" * 9999,
        b'{"n": 1, "m": "\\uD800"}',
    ],
)
def test_a_damaged_line_is_named_and_never_skipped(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n' + damage + b'\n{"n": 3}\n')
    with pytest.raises(FedsimError, match=r"rows\.jsonl, line 2: damaged.*remove the line"):
        read_lines(path, lambda row: row["n"] > 0)


def test_half_a_character_in_a_plan_is_refused(tmp_path: Path) -> None:
    """In a plan that is whole otherwise, so that nothing else of it is refused."""
    plan = Plan(scenario="s", variant={"a": "x"}, rounds=1, attack_runs=1, lines=1, resumable=True)
    plan.save(tmp_path)
    assert _load_plan(tmp_path) == plan
    path = tmp_path / PLAN
    path.write_text(path.read_text().replace('"x"', '"\\ud800"'))
    with pytest.raises(FedsimError, match=r"plan\.json: .*surrogates"):
        _load_plan(tmp_path)


def test_no_nan_is_ever_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        append_line(tmp_path / "rows.jsonl", {"psnr": float("nan")})
    assert not (tmp_path / "rows.jsonl").exists() or not read_lines(tmp_path / "rows.jsonl")


def test_the_hardware_and_the_commit_of_the_running_source_are_recorded() -> None:
    """Wherever in the tree the file stands that finds it."""
    facts = environment()
    assert facts["packages"]["fedsim"] and facts["processor"] and facts["cores"] >= 1
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    result = subprocess.run(git, capture_output=True, text=True)
    if result.returncode or not (ROOT / ".git").exists():
        pytest.skip("needs a checkout that git reads")
    assert str(facts["commit"]).removesuffix("+") == result.stdout.strip()
