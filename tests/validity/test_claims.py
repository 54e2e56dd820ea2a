"""Rules 20 and 21: an ε is of the releases that it names, with unit, relation and δ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_scenario

import fedsim
from fedsim.privacy.numerics import gaussian
from fedsim.report import leaderboard_rows, load_runs, render
from fedsim.report.facts import describe, utility
from fedsim.results import rows
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.words import format_claim

pytestmark = pytest.mark.usefixtures("attacks_here")

SCENARIO = tiny_scenario(
    training__local={"batch_size": 1},
    defenses={"dp": [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 4.0}]},
    attacks=["label_inference"],
    observe={"batch_sizes": [300]},
)


def workload(**changes: Any) -> Workload:
    return Workload(resolve({**SCENARIO, **changes}), "dp")


def row_claim(world: Workload) -> Any:
    return rows.claim_of(world, next(iter(world.recordings())))


def test_a_probe_of_many_images_costs_what_it_costs() -> None:
    """And not what a training on one image does, of which it once carried the ε."""
    world = workload()
    row, run = row_claim(world), rows.spent(world, 1)
    training = rows.spent(world, 1, probes=False)
    held = len(world.parts[0])
    everything = workload(observe={**SCENARIO["observe"], "batch_sizes": [held]})
    assert row_claim(everything).epsilon == pytest.approx(float(gaussian.epsilon(2.0, 1e-5)))
    assert training.epsilon < 0.2 < 0.8 < row.epsilon < row_claim(everything).epsilon
    assert run.epsilon > row.epsilon
    assert row.covers == "this probe"
    assert run.covers == "training of 1 round and 1 probe release"


def test_every_release_of_a_probe_counts() -> None:
    """100 releases of everything: one with a tenth of the noise."""
    held = len(workload().parts[0])
    observe = {**SCENARIO["observe"], "batch_sizes": [held], "releases": 100}
    world = workload(observe=observe)
    row, run = row_claim(world), rows.spent(world, 1)
    assert row.epsilon == pytest.approx(float(gaussian.epsilon(0.2, 1e-5)))
    assert run.epsilon >= row.epsilon
    assert row.covers == "this probe, released 100 times"
    trials = workload(observe={**observe, "releases": 1, "trials": 100})
    assert rows.spent(trials, 1).epsilon >= row.epsilon, "a hundred batches of everything"


def test_probes_outside_of_the_deployment_are_said_to_be() -> None:
    outside = workload(privacy={"probes": "outside"})
    claim = rows.spent(outside, 1)
    assert claim.epsilon == rows.spent(workload(), 1, probes=False).epsilon
    assert claim.covers == "training of 1 round, probes declared outside of the deployment"
    assert row_claim(outside).epsilon == row_claim(workload()).epsilon, "that very release"


@pytest.mark.slow
def test_rows_hold_both_claims_with_their_words(tmp_path: Path) -> None:
    run = fedsim.run(SCENARIO, out=tmp_path / "out", workers=1)
    (row,) = run.rows()
    claimed = row["privacy"]
    for one in (claimed, claimed["run"]):
        assert (one["unit"], one["relation"], one["delta"]) == ("example", "replace_one", 1e-5)
        assert one["covers"]
    assert claimed["run"]["epsilon"] > claimed["epsilon"]
    (line,) = [json.loads(x) for x in (run.out / "rounds.jsonl").read_text("utf-8").splitlines()]
    assert line["privacy"] == claimed["run"]
    assert line["epsilon"] == claimed["run"]["epsilon"]
    shown = render(leaderboard_rows([tmp_path / "out"]), "table", width=250)
    assert "(1e-05, example, replace one)" in shown
    assert "example, replace one)" in (run.out / "report.html").read_text(encoding="utf-8")


def test_without_attacks_the_claim_is_stated(tmp_path: Path) -> None:
    unattacked = {**SCENARIO, "attacks": [], "observe": {}}
    run = fedsim.run(unattacked, out=tmp_path / "out", workers=1)
    told = describe(utility(load_runs([run.out])))
    assert "(1e-05, example, replace one)" in told
    assert "training of 1 round" in told
    assert "(1e-05, example, replace one)" in (run.out / "report.html").read_text("utf-8")


@pytest.mark.parametrize("relation", ["close", "relative"])
def test_what_is_no_differential_privacy_is_said_to_be_none(relation: str) -> None:
    assert "no DP" in format_claim(1.0, 1e-5, "example", relation)
    assert "no DP" not in format_claim(1.0, 1e-5, "example", "replace_one")


def test_no_epsilon_is_bare() -> None:
    assert format_claim(2.0, None, None, None).count("unknown") == 3
    assert format_claim(math.inf, None, None, None) == "∞"
