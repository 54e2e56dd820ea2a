"""Resolved scenarios: defaults, dumps that load to the same, what YAML means, overrides, sweeps."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.scenario import (
    Scenario,
    ScenarioError,
    declared_training,
    dump,
    expand,
    load,
    locate,
    open_document,
    resolve,
)
from fedsim.scenario.document import Document, parse, show_path
from fedsim.scenario.reader import parse_yaml
from fedsim.types import FedsimError

LEAST: dict[str, Any] = {
    "name": "least",
    "data": {"source": "faces"},
    "model": "mlp",
    "attacks": [],
}

FULL: dict[str, Any] = {
    "name": "full",
    "description": "1e-3",
    "seed": 2**63 - 1,
    "data": {
        "source": {"name": "faces", "size": 16},
        "clients": 3,
        "partition": {"name": "dirichlet", "alpha": 1},
    },
    "model": {"name": "mlp", "hidden": [], "head": {"width": 64, "planted": 32}},
    "training": {"local": {"steps": 2, "lr": 1, "momentum": 0.5, "batches": "same"}},
    "defenses": {
        "none": [],
        "1e3": [{"name": "clip", "norm": 1}, {"name": "gaussian_noise", "multiplier": 0.5}],
        "yes": ["aggregate"],
        "q": [{"name": "quantization", "bits": 8}],
    },
    "attacks": [
        "label_inference",
        {"name": "inverting_gradients", "iterations": 3, "restarts": 2},
        {"name": "inverting_gradients", "label": "0x1F", "iterations": 4},
    ],
    "observe": {"rounds": [1, "last"], "clients": "all", "batch_sizes": [1, 2], "trials": 3},
    "knowledge": {"labels": "known", "bn": "exact"},
    "privacy": {"delta": 1e-7},
}


@pytest.mark.parametrize("written", [LEAST, FULL], ids=["least", "full"])
def test_a_dump_loads_to_an_equal_scenario_and_is_stable(
    written: dict[str, Any], tmp_path: Path
) -> None:
    scenario = resolve(written)
    text = dump(scenario)
    path = tmp_path / "dumped.yaml"
    path.write_text(text, encoding="utf-8")
    again = load(path)
    assert again == scenario
    assert dump(again) == text
    assert resolve(scenario) == scenario
    assert resolve(yaml.safe_load(text)) == scenario, "a YAML 1.1 reader sees something else"


@settings(max_examples=12, deadline=None)
@example("\x85", 0, 0.1, "a", [1])
@example("a\nb\u2028c\ufeff\n\nd ", 0, 0.1, "a", [1])
@given(
    description=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    seed=st.integers(0, 2**63 - 1),
    lr=st.floats(1e-300, 1e11),
    stack=st.from_regex(r"\A[A-Za-z0-9](\.?[A-Za-z0-9_+-]){0,20}\Z"),
    rounds=st.lists(st.integers(1, 50), min_size=1, unique=True),
)
def test_any_valid_value_survives_a_dump(
    description: str, seed: int, lr: float, stack: str, rounds: list[int]
) -> None:
    scenario = resolve(
        {
            **LEAST,
            "description": description,
            "seed": seed,
            "training": {"rounds": 50, "local": {"lr": lr}},
            "defenses": {stack: [{"name": "clip", "norm": 2.0}]},
            "observe": {"rounds": rounds},
        }
    )
    assert resolve(parse_yaml(dump(scenario), "dump")) == scenario


def test_every_default_is_written_out() -> None:
    scenario = resolve(LEAST)
    assert scenario.data.source.parameters["size"] > 0
    assert "hidden" in scenario.model.parameters
    plain = yaml.safe_load(dump(scenario))
    # The usual learner is not: resolved scenarios from before there were others stay the same.
    expected = [name for name in Scenario.model_fields if name != "learner"]
    assert list(plain) == expected, "in the order of the model"
    assert plain["model"]["name"] == "mlp"
    assert plain["model"]["head"] is None


@pytest.mark.parametrize(
    ("local", "algorithm"),
    [
        ({}, "fedsgd"),
        ({"steps": 2}, "fedavg"),
        ({"momentum": 0.1}, "fedavg"),
        ({"steps": 1, "momentum": 0}, "fedsgd"),
    ],
)
def test_the_algorithm_follows_from_the_local_training(
    local: dict[str, Any], algorithm: str
) -> None:
    scenario = resolve({**LEAST, "training": {"local": local}})
    assert scenario.training.algorithm == algorithm
    assert declared_training(scenario.training).algorithm == algorithm


def test_declared_training_is_what_the_scenario_says() -> None:
    training = declared_training(resolve(FULL).training)
    assert (training.steps, training.batch_size, training.lr) == (2, 4, 1.0)
    assert (training.momentum, training.mode, training.batches) == (0.5, "train", "same")
    assert training.dropout == 0.0, "defenses are not part of it"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-0x1F", "-0x1F"),
        ("0x1F", 31),
        ("0o17", 15),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ('"\\u00e9"', "é"),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(f"x: {text}", "t").value["x"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_anchors_and_merges_are_expanded_with_the_places_of_what_is_written() -> None:
    document = parse_yaml(
        "base: &base {a: 1, b: 2}\n"
        "other: &other {b: 3, c: 4}\n"
        "one: *base\n"
        "two:\n"
        "  <<: [*base, *other]\n"
        "  a: 5\n",
        "t",
    )
    assert document.value["one"] == {"a": 1, "b": 2}
    assert document.value["two"] == {"a": 5, "b": 2, "c": 4}
    assert document.mark(("one",)).line == 3
    assert document.mark(("two", "a")).line == 6
    assert document.mark(("two", "c")).line == 2


KEYS = st.one_of(st.integers(0, 10**6), st.text(st.characters(exclude_categories=["Cs"])))


@given(st.lists(KEYS, min_size=1, max_size=32).filter(lambda path: isinstance(path[0], str)))
def test_key_paths_are_written_so_that_they_can_be_read(path: list[str | int]) -> None:
    assert parse(show_path(tuple(path))) == tuple(path)


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", "a[", "a[x]", "a[-1]", "a b"])
def test_what_is_no_key_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no key path"):
        parse(text)


def test_errors_of_a_python_scenario_have_a_path_but_no_line() -> None:
    with pytest.raises(ScenarioError) as caught:
        resolve({**LEAST, "seed": -1})
    assert caught.value.path == "seed"
    assert caught.value.line is None
    assert str(caught.value) == "seed: expected >= 0, got -1"


@pytest.mark.parametrize("value", [{1, 2}, object(), {"a": b"x"}])
def test_values_that_yaml_has_not_are_refused(value: object) -> None:
    with pytest.raises(ScenarioError, match="use only mappings, lists, text"):
        resolve({**LEAST, "description": value})


def test_later_errors_can_be_located() -> None:
    document = parse_yaml(
        "name: a\ndata:\n  clients: 4\nsweep:\n  training.rounds: [1]\n", "x.yaml"
    )
    error = locate(document, FedsimError("data.clients: too many: 4"))
    assert str(error) == "x.yaml:3: data.clients: too many: 4"
    assert (error.path, error.line) == ("data.clients", 3)
    swept = locate(document, FedsimError("training.rounds: too few"))
    assert str(swept) == "x.yaml:5: training.rounds: too few"
    absent = locate(document, FedsimError("data.partition: impossible"))
    assert str(absent) == "x.yaml:2: data.partition: impossible"
    elsewhere = locate(document, FedsimError("/data/x.png: is no image"))
    assert str(elsewhere) == "x.yaml: /data/x.png: is no image"
    assert locate(Document({}), FedsimError("a: b")).line is None


def test_combinations_of_partition_and_key() -> None:
    keys = {"alpha": 0.5, "shards_per_client": 2, "path": "x.csv"}
    needed = {"dirichlet": "alpha", "shards": "shards_per_client", "file": "path"}
    for name, key in itertools.product(["iid", "natural", *needed], keys):
        written = {
            **LEAST,
            "data": {"source": "faces", "partition": {"name": name, key: keys[key]}},
        }
        if needed.get(name) == key:
            resolve(written)
        else:
            with pytest.raises(ScenarioError, match=r"data\.partition"):
                resolve(written)


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
