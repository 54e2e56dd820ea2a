"""Rows say what theory allows beside what was measured, and why where it is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_scenario

import fedsim
from fedsim.results.record import read_lines

pytestmark = pytest.mark.usefixtures("attacks_here")

PRIVATE = {"name": "dp_sgd", "norm": 1.0}
STACKS: dict[str, list[Any]] = {
    "none": [],
    "noise": [{"name": "gaussian_noise", "std": 0.1}],
    "loud": [{**PRIVATE, "noise_multiplier": 50.0}],
    "quiet": [{**PRIVATE, "noise_multiplier": 2.0}],
}
SCENARIO = tiny_scenario(
    seed=3,
    data__source={"name": "digits", "size": 16},
    model={"name": "mlp", "hidden": [8]},
    training__local={"batch_size": 2},
    defenses=STACKS,
    attacks=[{"name": "idlg", "iterations": 2}],
    observe={"batch_sizes": [1]},
)


def theory(out: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    fedsim.run({**SCENARIO, **changes}, out=out, workers=1)
    rows = read_lines(out / "results.jsonl")
    return {row["defense"]["name"]: {**row["theory"], "guess": row["baseline"]} for row in rows}


def test_rows_have_a_limit_or_a_reason(tmp_path: Path) -> None:
    found = theory(tmp_path / "run")
    assert found["none"]["psnr"] is None
    assert "no noise" in found["none"]["limit_reason"]
    assert "clip first" in found["noise"]["limit_reason"]
    loud, quiet = found["loud"], found["quiet"]
    # Who guesses is an attack as well, and less noise allows more.
    assert loud["guess"]["psnr"] < loud["psnr"] < quiet["psnr"] <= 60
    assert loud["limit_reason"] is None and loud["limit_unit"] == "example"
    assert "public images" in loud["limit_prior"]
    assert loud["feature_cosine"] is loud["tensor_rate"] is loud["tensor_bound_valid"] is None


def test_there_is_no_limit_where_more_is_known_than_the_release(tmp_path: Path) -> None:
    stacks = {"none": [], "loud": STACKS["loud"]}
    known = theory(tmp_path / "known", defenses=stacks, knowledge={"features": "known"})
    assert "features=known" in known["loud"]["limit_reason"]
    outside = theory(tmp_path / "outside", defenses=stacks, privacy={"probes": "outside"})
    assert "outside" in outside["loud"]["limit_reason"]


def test_shares_of_members_stand_beside_what_all_rounds_allow(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data": {"source": {"name": "digits", "size": 8}, "clients": 2},
        "training": {
            "rounds": 2,
            "local": {"steps": 2, "batch_size": 20, "lr": 0.1, "sampling": "poisson"},
        },
        "defenses": {"none": [], "loud": STACKS["loud"]},
        "attacks": ["update_membership"],
        "observe": {"rounds": [1, 2], "clients": [0], "candidates": 240},
        "knowledge": {"labels": "none", "public": "test"},
    }
    found = theory(tmp_path / "run", **changes)
    assert found["none"]["membership_tpr_at_1_percent"] is None
    loud = found["loud"]
    # At ε = 0.003 the most is hardly above the false alarms, whose true rate may be three times as
    # high at a threshold that was estimated from 120 others.
    assert 0.02 < loud["membership_tpr_at_1_percent"] < 0.2
    # About 120 of 240 took no part, which is too few for a rate of 0.1%.
    assert loud["membership_tpr_at_01_percent"] is None
    assert 0.5 < loud["membership_auc"] < 0.7
    rows = read_lines(tmp_path / "run/results.jsonl")
    # Both rounds are asked about at once, at the last one.
    assert [(row["round"], row["status"]) for row in rows] == [(2, "ok"), (2, "ok")]
    assert 90 < (others := rows[0]["metrics"]["membership_others"]) < 150
    assert others + rows[0]["metrics"]["membership_members"] == 240
    # Noise that hides all members refutes nothing, and no claim has no p-value.
    assert found["none"]["membership_p"] is None
    assert loud["membership_p"] > 0.05
