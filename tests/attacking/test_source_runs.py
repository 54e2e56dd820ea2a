"""A run asks once for each stack which client holds a record, of the records of all clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny_scenario

import fedsim

pytestmark = pytest.mark.usefixtures("attacks_here")

SCENARIO = tiny_scenario(
    seed=3,
    data__clients=4,
    model={"name": "mlp", "hidden": [32]},
    training={"rounds": 4, "local": {"steps": 2, "batch_size": 20}},
    defenses={"none": [], "sum": ["aggregate"]},
    attacks=["source_inference"],
    federation={"participation": 0.5},
    observe={"rounds": [1, 2, 3, 4], "clients": "all", "candidates": 40},
)


def test_each_stack_has_one_row_and_a_replay_repeats_it(tmp_path: Path) -> None:
    fedsim.run(SCENARIO, out=tmp_path, workers=1)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["defense"]["name"] for row in rows] == ["none", "sum"]
    for row in rows:
        assert (row["status"], row["round"]) == ("ok", 4)
        assert row["metrics"]["source_accuracy_low"] < row["metrics"]["source_accuracy"]
        assert row["baseline"]["source_accuracy"] >= 0.25
        path = tmp_path / "observations" / f"{row['observation']}.json"
        _, again = fedsim.attack(path, "source_inference")
        for name in ("source_accuracy", "source_rank", "source_p_value"):
            assert again["metrics"][name] == pytest.approx(row["metrics"][name])
    none, sums = (row["metrics"]["source_rank"] for row in rows)
    assert none < sums and none < 2.5, "sums tell less than single updates"
