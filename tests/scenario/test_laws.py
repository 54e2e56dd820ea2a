"""Resolved scenarios: defaults written out, dumps that load to the same, what YAML means."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsim.scenario import Scenario, ScenarioError, declared_training, dump, load, locate, resolve
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
    assert str(document.error("name", "odd")) == "x.yaml:1: name: odd"
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
