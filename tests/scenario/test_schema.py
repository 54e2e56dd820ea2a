"""The JSON Schema accepts what loads, and refuses what an editor should mark."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsim.scenario import dump, json_schema, resolve

jsonschema = pytest.importorskip("jsonschema")

WRITTEN: dict[str, Any] = {
    "name": "x",
    "data": {"source": {"name": "faces", "size": 16}},
    "model": {"name": "mlp", "head": {"width": 64}},
    "attacks": ["label_inference", {"name": "inverting_gradients", "iterations": 3, "restarts": 2}],
    "defenses": {
        "none": [],
        "dp": [{"name": "clip", "norm": 1}, {"name": "gaussian_noise", "std": 1}],
    },
    "observe": {"rounds": [1, "last"], "clients": "all"},
    "sweep": {"training.rounds": [1, 2]},
}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def valid(value: object, schema: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


def test_it_accepts_what_loads(schema: dict[str, Any]) -> None:
    assert valid(WRITTEN, schema)
    swept = deepcopy(WRITTEN)
    del swept["sweep"]
    assert valid(yaml.safe_load(dump(resolve(swept))), schema)


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "scenarios").rglob("*.yaml")),
    ids=lambda path: str(path.relative_to(path.parents[1])),
)
def test_it_accepts_the_scenarios_we_ship(path: Path, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seeed",), 1),
        (("data", "source", "siz"), 1),
        (("model", "head", "widht"), 1),
        (("attacks", 1, "restarts"), 0),
        (("defenses", "dp", 0, "norm"), -1),
        (("defenses", "dp", 0), {"name": "clip"}),
        (("defenses", "../x"), []),
        (("sweep", "seed"), 3),
    ],
)
def test_it_refuses(place: tuple[Any, ...], value: object, schema: dict[str, Any]) -> None:
    changed = deepcopy(WRITTEN)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not valid(changed, schema)
