"""Updates that say nothing: the run goes on, and its rows say what happened.

That such updates are counted and left out is shown in tests/federation/test_federation_tap.py, and
rows of an update that never came in tests/validity/test_road.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from plugins_here import registered

import fedsim
from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.results.record import Run
from fedsim.types import Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")


class Faulty(UpdateDefense):
    """Fills the second and later updates of a process with one value."""

    calls: ClassVar[list[str]] = []
    value: str

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        self.calls.append(self.value)
        if self.calls.count(self.value) == 1:  # the check before any training
            return update, state
        return {name: torch.full_like(t, float(self.value)) for name, t in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.unproven("it is faulty")


FAULTS = {"nan": ("nan", "non-finite"), "zero": ("0", "zero everywhere")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    stacks = {name: [{"name": "faulty", "value": value}] for name, (value, _) in FAULTS.items()}
    scenario: dict[str, Any] = {
        "name": "faults",
        "data": {"source": "digits", "clients": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 2, "local": {"batch_size": 2}},
        "defenses": {"none": [], **stacks},
        "attacks": [{"name": "inverting_gradients", "iterations": 3}],
        "observe": {"rounds": [2], "clients": [1]},
    }
    Faulty.calls.clear()
    with registered({"defenses": {"faulty": Faulty}}):
        return fedsim.run(scenario, out=tmp_path_factory.mktemp("faults") / "out", workers=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_row_says_why_nothing_was_recovered(finished: Run, fault: str) -> None:
    (row,) = [row for row in finished.rows() if row["defense"]["name"] == fault]
    assert row["status"] == "failed" and FAULTS[fault][1] in row["reason"]
    assert all(value is None for value in row["metrics"].values())
    assert FAULTS[fault][1] in finished.report.read_text(encoding="utf-8")


def test_other_stacks_are_not_affected(finished: Run) -> None:
    (row,) = [row for row in finished.rows() if row["defense"]["name"] == "none"]
    assert row["status"] == "ok" and row["metrics"]["psnr"] > 0
