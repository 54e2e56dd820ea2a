"""A table trains a network, is attacked, and is scored column by column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.acceptance import validate
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")


def scenario(folder: Path, **changes: Any) -> dict[str, Any]:
    """A scenario on a table of ages, colors and three classes."""
    lines = [
        f"{(37 * i) % 101},{['red', 'green', 'blue'][i % 3]},{'xyz'[(i * i) % 3]}\n"
        for i in range(120)
    ]
    path = folder / "people.csv"
    path.write_text("age,color,kind\n" + "".join(lines), encoding="utf-8")
    features = [
        {"name": "age", "low": 0, "high": 100},
        {"name": "color", "categories": ["red", "green", "blue"]},
    ]
    target = {"name": "kind", "classes": ["x", "y", "z"]}
    source = {"name": "table", "path": str(path), "features": features, "target": target}
    return {
        "name": "table",
        "data": {"source": source, "clients": 2},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 1, "local": {"batch_size": 4}},
        "defenses": {"none": [], "noise": [{"name": "gaussian_noise", "std": 1.0}]},
        "attacks": [{"name": "inverting_gradients", "iterations": 150}, "label_inference"],
        "observe": {"rounds": [1], "batch_sizes": [1], "trials": 2},
        **changes,
    }


def test_a_table_is_trained_attacked_and_scored_by_columns(tmp_path: Path) -> None:
    fedsim.run(scenario(tmp_path), out=tmp_path / "out", quiet=True)
    lines = (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["attack"]["name"] != "label_inference"]
    assert {row["status"] for row in rows} == {"ok"}
    bare = [row for row in rows if row["defense"]["name"] == "none"]
    noisy = [row for row in rows if row["defense"]["name"] == "noise"]
    for row in rows:
        assert row["baseline"]["name"] == "mean_row"
        assert len(row["per_image"]["column_accuracy"]) == 2
        assert len(row["baseline"]["per_image"]["column_accuracy"]) == 2
        assert row["metrics"]["psnr"] is None
    gained = [
        row["metrics"]["column_accuracy"] - row["baseline"]["column_accuracy"] for row in bare
    ]
    assert sum(gained) / len(gained) > 0.2
    assert _mean(bare) > _mean(noisy)
    assert (tmp_path / "out" / "report.html").exists()


def _mean(rows: list[dict[str, Any]]) -> float:
    return sum(row["metrics"]["column_accuracy"] for row in rows) / len(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "mlp", "imprint": {}}}, "imprint takes images"),
        ({"attacks": ["deep_leakage"]}, r"attacks\[0\]: deep_leakage takes a model's inputs for"),
        (
            {"learner": {"name": "sketch", "columns": 9}},
            "has 3 classes, and learner sketch takes two",
        ),
    ],
)
def test_what_takes_images_is_refused_with_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    wanted = {key: value for key, value in scenario(tmp_path, **changes).items() if value}
    if "learner" in changes:
        wanted = {key: wanted[key] for key in ("name", "data", "learner")} | {
            "attacks": [],
            "training": {"rounds": 1},
        }
    with pytest.raises(FedsimError, match=message):
        validate(wanted)
