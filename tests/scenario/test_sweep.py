"""Overrides and sweeps: one file, several scenarios."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedsim.scenario import ScenarioError, expand, load, open_document

LEAST: dict[str, Any] = {
    "name": "least",
    "data": {"source": "faces"},
    "model": "mlp",
    "attacks": [],
}
TEXT = """\
name: least
data: {source: faces}
model: mlp
attacks:
  - {name: label_inference}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_sweep_multiplies_and_the_last_list_varies_fastest() -> None:
    sweep = {"training.local.steps": [1, 4], "training.rounds": [2, 3, 5]}
    variants = expand({**LEAST, "sweep": sweep})
    settings = [(v.scenario.training.local.steps, v.scenario.training.rounds) for v in variants]
    assert settings == [(1, 2), (1, 3), (1, 5), (4, 2), (4, 3), (4, 5)]
    assert variants[0].label == "training.local.steps=1,training.rounds=2"
    assert variants[5].assignment == {"training.local.steps": 4, "training.rounds": 5}
    algorithms = [v.scenario.training.algorithm for v in variants]
    assert algorithms == ["fedsgd"] * 3 + ["fedavg"] * 3, "each variant is resolved by itself"


def test_labels_are_distinct_stable_and_safe_as_folders() -> None:
    models = ["mlp", {"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [8, 8]}]
    texts = ["a/b", "a\\b", "a b", "../x", "x" * 300, "x" * 301, "", "é"]
    written = {**LEAST, "sweep": {"model": models, "description": texts}}
    labels = [variant.label for variant in expand(written)]
    assert len({label.lower() for label in labels}) == 24
    assert all(re.fullmatch(r"[A-Za-z0-9_.+=,-]{1,120}", label) for label in labels), labels
    assert not any(label.startswith(".") for label in labels)
    assert labels == [
        v.label for v in expand({**LEAST, "sweep": {"model": models, "description": texts}})
    ]
    assert labels[8].startswith("model=mlp+hidden=8,description=a-b-")


def test_items_of_lists_can_be_swept() -> None:
    written = {
        **LEAST,
        "attacks": ["inverting_gradients", "label_inference"],
        "sweep": {"attacks[0].iterations": [1, 2]},
    }
    variants = expand(written)
    assert [v.scenario.attacks[0].parameters["iterations"] for v in variants] == [1, 2]
    assert variants[1].label == "attacks-0-.iterations=2-" + variants[1].label[-8:]
    assert variants[0].scenario.attacks[1].name == "label_inference"


def test_errors_of_a_sweep_are_told_once_for_each_value(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        TEXT + "sweep:\n  training.rounds:\n    - 1\n    - 0\n  seed:\n    - 1\n    - -1\n",
        encoding="utf-8",
    )
    with pytest.raises(ScenarioError) as caught:
        expand(open_document(path))
    assert str(caught.value).splitlines() == [
        f"{path}:9: training.rounds: expected >= 1, got 0",
        f"{path}:12: seed: expected >= 0, got -1",
    ]


def test_one_scenario_is_not_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT + "sweep: {seed: [1, 2]}\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r":6: sweep: stands for 2 scenarios where one"):
        load(path)
    assert load(path, ["seed=3"]).seed == 3
    assert load(path, ["sweep=null"]).seed == 0


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("training.rounds=10", lambda s: s.training.rounds, 10),
        ("description=", lambda s: s.description, None),
        ("description=a=b", lambda s: s.description, "a=b"),
        ("attacks[0].restarts=3", lambda s: s.attacks[0].restarts, 3),
        ("attacks[0]=idlg", lambda s: s.attacks[0].name, "idlg"),
        ("model.hidden=[7]", lambda s: s.model.parameters["hidden"], [7]),
        ("data.source.size=16", lambda s: s.data.source.parameters["size"], 16),
        ('defenses["v1.0"]=[]', lambda s: s.defenses, {"v1.0": []}),
    ],
)
def test_overrides(override: str, read: Any, value: object, path: Path) -> None:
    if value is None:
        with pytest.raises(ScenarioError, match="expected text, got nothing"):
            load(path, [override])
    else:
        assert read(load(path, [override])) == value


def test_all_wrong_overrides_are_told(path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        open_document(path, ["nonsense", "a b=1", "seed=!!int 1"])
    assert [problem.origin for problem in caught.value.problems] == [
        "--set nonsense",
        "--set a b=1",
        "--set seed=!!int 1",
    ]
    with pytest.raises(ScenarioError) as caught:
        open_document(path, ["attacks[3]=idlg", "name.x=1"])
    assert len(caught.value.problems) == 2


def test_an_override_can_change_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT + "sweep: {seed: [1, 2], training.rounds: [4, 5]}\n", encoding="utf-8")
    pinned = expand(open_document(path, ["seed=9"]))
    assert [v.label for v in pinned] == ["training.rounds=4", "training.rounds=5"]
    assert {v.scenario.seed for v in pinned} == {9}
    outer = expand(open_document(path, ["training={rounds: 3}"]))
    assert [v.label for v in outer] == ["seed=1", "seed=2"]
    other = expand(open_document(path, ['sweep["training.rounds"]=[7]']))
    assert [v.scenario.training.rounds for v in other] == [7, 7]
