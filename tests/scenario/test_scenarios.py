"""Every scenario that ships is valid, in its resolved form and by the JSON Schema, too."""

from __future__ import annotations

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from slow_cases import slow_but

from fedsim.results.rows import _row_noise
from fedsim.scenario import Scenario, dump, expand, json_schema, load, open_document, resolve
from fedsim.training.workload import Workload

SCENARIOS = Path(__file__).parents[2] / "scenarios"
FILES = sorted(SCENARIOS.rglob("*.yaml"))


@functools.cache
def scenarios(path: Path) -> list[Scenario]:
    """Every member of a sweep."""
    return [variant.scenario for variant in expand(open_document(path))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_valid(path: Path, tmp_path: Path) -> None:
    for scenario in scenarios(path):
        resolved = tmp_path / "resolved.yaml"
        resolved.write_text(dump(scenario))
        assert load(resolved) == scenario
        assert [] in scenario.defenses.values(), "no positive control"


RECONSTRUCTION = SCENARIOS / "reconstruction"
REPORTED_SEED = 2027
"""No attack was ever run on its batches before a report: choices were made on other seeds
(docs/refuted.md, "Which batches were tuned on")."""


@pytest.mark.parametrize("path", sorted(RECONSTRUCTION.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_report_is_of_batches_on_which_nothing_was_tuned(path: Path) -> None:
    (scenario,) = scenarios(path)
    assert scenario.seed == REPORTED_SEED or not scenario.attacks


@pytest.mark.parametrize(
    "path", sorted(RECONSTRUCTION.glob("table*.yaml")), ids=lambda path: path.stem
)
def test_rivals_behind_a_planted_head_are_run_on_the_body_as_well(path: Path) -> None:
    (scenario,) = scenarios(path)
    planted = (scenario.model.parameters.get("head") or {}).get("planted", 0)
    own = {entry.name for entry in scenario.attacks}
    matched = [e for e in scenario.attacks if e.name == "inverting_gradients"]
    if planted and "factored_inversion" in own and matched:
        assert {e.parameters["tensors"] for e in matched} == {"all", "body"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_label_says_what_was_run_in_place_of_the_published_method(path: Path) -> None:
    for scenario in scenarios(path):
        for entry in scenario.attacks:
            if entry.name == "feature_inversion":
                assert (entry.parameters["prior"] != "unet") == ("pixels" in (entry.label or ""))


PRINTED = {
    "printed-noise-cancer": {"paper": 6.850, "sheffet": 20.317},
    "printed-noise-cancer-coefficients": {"paper": 7.917},
    "printed-noise-flight": {"paper": 0.745, "sheffet": 2.060, "sheffet-least-delta": 2.704},
}
"""The noise that Tables I to IV of the NDIS paper print, by the scenarios that run it."""


@pytest.mark.parametrize(
    "name", slow_but(PRINTED.keys() - {"printed-noise-cancer-coefficients"}, PRINTED.keys())
)
def test_a_scenario_uses_the_printed_noise(name: str) -> None:
    scenario = load(SCENARIOS / "private" / f"{name}.yaml")
    first = Workload(scenario, "none")
    assert _row_noise(first) is None
    for stack, printed in PRINTED[name].items():
        noise = _row_noise(Workload(scenario, stack, first.dataset))
        assert f"{noise:.3f}" == f"{printed:.3f}", stack
    tight = _row_noise(Workload(scenario, "tight", first.dataset))
    assert tight is not None and tight < PRINTED[name]["paper"]


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
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


def test_it_describes_parameters_for_editors(schema: dict[str, Any]) -> None:
    forms = {form.get("title"): form for form in schema["properties"]["model"]["anyOf"]}
    assert forms["convnet"]["description"]
    assert forms["convnet"]["properties"]["width"]["description"]
    assert schema["$defs"]["LocalSection"]["properties"]["batches"]["default"] == "different"
