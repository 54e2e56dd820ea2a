"""A limit of ε is kept by claims that are differential privacy and that nothing refutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report.limits import broken_limits
from fedsim.results.reading import ReportError


def rewrite(path: Path, **changes: Any) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, **changes}) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of one private stack, whose ε is 7.82."""
    stacks = {"none": STACKS["none"], "dp": STACKS["dp"]}
    return write_run(tmp_path / "run", stacks=stacks, trials=3, batch_sizes=(1,))


def claimed(relation: str, epsilon: float = 7.82) -> dict[str, Any]:
    return {"epsilon": epsilon, "delta": 1e-5, "unit": "example", "relation": relation}


@pytest.mark.parametrize("relation", ["close", "relative"])
def test_what_is_no_differential_privacy_keeps_to_no_limit(run: Path, relation: str) -> None:
    rewrite(run / "rounds.jsonl", privacy=claimed("add_or_remove"))
    assert broken_limits([run], max_epsilon=8.0) == []
    rewrite(run / "rounds.jsonl", privacy=claimed(relation))
    (line,) = broken_limits([run], max_epsilon=8.0)
    assert line.startswith("dp: ") and relation in line
    assert CliRunner().invoke(app, ["check", str(run), "--max-epsilon", "8"]).exit_code == 1


@pytest.mark.parametrize(("delta", "broken"), [(1e-3, False), (0.5, True)])
def test_a_large_delta_keeps_to_no_limit(run: Path, delta: float, broken: bool) -> None:
    claim = claimed("add_or_remove") | {"delta": delta}
    rewrite(run / "rounds.jsonl", privacy=claim)
    lines = broken_limits([run], max_epsilon=8.0)
    assert len(lines) == broken and all(line.startswith("dp: ") for line in lines)
    rewrite(run / "rounds.jsonl", privacy=claimed("add_or_remove"))
    rewrite(run / "results.jsonl", vantage="client", privacy=claim)
    lines = broken_limits([run], max_epsilon=8.0, defenses=["dp"])
    assert bool(lines) == broken, "what a participant learns is held to it, too"


def test_what_an_audit_refutes_keeps_to_no_limit(run: Path) -> None:
    line = {"defense": "dp", "method": "two_worlds", "holds": True, "delta": 1e-5}
    for audited, broken in ((7.0, 0), (9.5, 1)):
        found = {**line, "audited_epsilon": audited, "holds": not broken}
        (run / "audit.jsonl").write_text(json.dumps(found) + "\n")
        assert len(broken_limits([run], max_epsilon=8.0)) == broken


@pytest.mark.parametrize(
    ("scores", "broken"),
    [((0.97, 0.98, 0.99), True), ((1.0, 1.0, 1.0), True), ((0.5, 0.7, 0.9), False)],
)
def test_what_a_membership_attack_refutes_keeps_to_no_limit(
    run: Path, scores: tuple[float, ...], broken: bool
) -> None:
    """An ε of 1 allows an area of 0.73; three trials above it have an interval above it."""
    path = run / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["privacy"] = claimed("add_or_remove", 1.0)
        row["metrics"]["membership_auc"] = scores[row["trial"]]
        row["theory"] = {"membership_auc": 0.7311, "membership_tpr": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line for line in broken_limits([run], max_epsilon=8.0) if "membership_auc" in line]
    assert bool(lines) == broken


def test_what_a_participant_learns_is_held_to_the_limit(run: Path) -> None:
    path = run / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"vantage": "client", "privacy": claimed("zero_out", 9.5)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert any("9.5" in line for line in broken_limits([run], max_epsilon=8.0, defenses=["dp"]))
    assert not broken_limits([run], max_epsilon=10.0, defenses=["dp"])


def unattacked(run: Path, stacks: str) -> Path:
    (run / "results.jsonl").write_text("")
    scenario = run / "scenario.yaml"
    scenario.write_text(scenario.read_text() + f"attacks: []\ndefenses: {stacks}\n")
    return run


def test_a_run_without_attacks_is_held_to_a_limit_of_epsilon(run: Path) -> None:
    unattacked(run, "{none: [], dp: [clip], lost: [clip]}")
    lines = broken_limits([run], max_epsilon=8.0)
    assert len(lines) == 1 and lines[0].startswith("lost: "), "of it no ε was stated"
    assert broken_limits([run], max_epsilon=8.0, defenses=["dp"]) == []
    (line,) = broken_limits([run], max_epsilon=7.8, defenses=["dp"])
    assert line.startswith("dp: ")
    measured = broken_limits([run], max_psnr=40.0, defenses=["dp"])
    assert any(line.startswith("dp: ") for line in measured), "nothing was measured"
    with pytest.raises(ReportError, match="--defense: pd"):
        broken_limits([run], max_epsilon=8.0, defenses=["pd"])


def test_a_run_without_attacks_or_defenses_is_no_subject(run: Path) -> None:
    with pytest.raises(ReportError, match="no defended stack"):
        broken_limits([unattacked(run, "{none: []}")], max_epsilon=8.0)
