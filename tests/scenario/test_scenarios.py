"""Every scenario that ships is valid, and so is its resolved form."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from slow_cases import slow_but

from fedsim.results.rows import row_noise
from fedsim.scenario import Scenario, dump, expand, load, open_document
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
    assert row_noise(first) is None
    for stack, printed in PRINTED[name].items():
        noise = row_noise(Workload(scenario, stack, first.dataset))
        assert f"{noise:.3f}" == f"{printed:.3f}", stack
    tight = row_noise(Workload(scenario, "tight", first.dataset))
    assert tight is not None and tight < PRINTED[name]["paper"]
