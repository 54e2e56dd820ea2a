"""The noise that Tables I to IV of the NDIS paper print, by the scenarios that run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from slow_cases import slow_but

from fedsim.results.rows import row_noise
from fedsim.scenario import load
from fedsim.training.workload import Workload

FOLDER = Path(__file__).parents[2] / "scenarios" / "private"
PRINTED = {
    "printed-noise-cancer": {"paper": 6.850, "sheffet": 20.317},
    "printed-noise-cancer-coefficients": {"paper": 7.917},
    "printed-noise-flight": {"paper": 0.745, "sheffet": 2.060, "sheffet-least-delta": 2.704},
}


@pytest.mark.parametrize(
    "name", slow_but(PRINTED.keys() - {"printed-noise-cancer-coefficients"}, PRINTED.keys())
)
def test_a_scenario_uses_the_printed_noise(name: str) -> None:
    scenario = load(FOLDER / f"{name}.yaml")
    first = Workload(scenario, "none")
    assert row_noise(first) is None
    for stack, printed in PRINTED[name].items():
        noise = row_noise(Workload(scenario, stack, first.dataset))
        assert f"{noise:.3f}" == f"{printed:.3f}", stack
    tight = row_noise(Workload(scenario, "tight", first.dataset))
    assert tight is not None and tight < PRINTED[name]["paper"]
