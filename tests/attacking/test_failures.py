"""Clients that misbehave: the run goes on, and its rows say what happened."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from clock import Clock, stopped

import fedsim
from fedsim.contracts import plugins
from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.results.record import Run
from fedsim.types import Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")


class Faulty(UpdateDefense):
    """Does to the second and later updates of a process what its parameter says."""

    calls: ClassVar[list[str]] = []
    clock: ClassVar[list[Clock]] = []
    fault: str

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        self.calls.append(self.fault)
        if self.calls.count(self.fault) == 1:  # the check before any training
            return update, state
        if self.fault == "raise":
            raise RuntimeError("out of battery")
        if self.fault == "late":
            self.clock[0].sleep(1.2)
        value = {"nan": float("nan"), "inf": float("inf")}.get(self.fault, 0.0)
        if self.fault == "late":
            return update, state
        return {name: torch.full_like(tensor, value) for name, tensor in update.items()}, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.unproven("it is faulty")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    scenario: dict[str, Any] = {
        "name": "faults",
        "data": {"source": "digits", "clients": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 2, "local": {"batch_size": 2}},
        "federation": {"timeout": 1.0},
        "defenses": {
            "none": [],
            **{
                fault: [{"name": "faulty", "fault": fault}]
                for fault in ("nan", "inf", "zero", "raise", "late")
            },
        },
        "attacks": [{"name": "inverting_gradients", "iterations": 3}],
        "observe": {"rounds": [2], "clients": [1]},
    }
    with pytest.MonkeyPatch.context() as patch:
        installed = plugins._entry_points
        faulty = (EntryPoint("faulty", f"{__name__}:Faulty", "fedsim.defenses"),)

        def with_faulty(group: str) -> dict[str, tuple[EntryPoint, ...]]:
            more = {"faulty": faulty} if group == "fedsim.defenses" else {}
            return {**installed(group), **more}

        patch.setattr(plugins, "_entry_points", with_faulty)
        Faulty.clock[:] = [stopped(patch)]
        Faulty.calls.clear()
        out = tmp_path_factory.mktemp("faults") / "out"
        return fedsim.run(scenario, out=out, workers=1)


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("nan", "non_finite"), ("inf", "non_finite"), ("raise", "client_error"), ("late", "late")],
)
def test_a_useless_update_is_counted_and_left_out(finished: Run, fault: str, counted: str) -> None:
    rounds = [row for row in finished.rounds() if row["defense"] == fault]
    assert [row["round"] for row in rounds] == [1, 2]
    for row in rounds:
        assert row["failures"][counted] == 2 and row["aggregated"] == 0
        assert sum(row["failures"].values()) == 2
        assert row["test_accuracy"] is not None
    assert any("out of battery" in d for r in rounds for d in r["details"]) == (fault == "raise")


def test_a_zero_update_is_aggregated_and_counted(finished: Run) -> None:
    rounds = [row for row in finished.rounds() if row["defense"] == "zero"]
    assert all(r["aggregated"] == 2 and r["zero_updates"] == 2 for r in rounds)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "non-finite"),
        ("inf", "non-finite"),
        ("zero", "zero everywhere"),
        ("raise", "no usable update"),
        ("late", "no usable update"),
    ],
)
def test_the_row_says_why_nothing_was_recovered(finished: Run, fault: str, reason: str) -> None:
    (row,) = [row for row in finished.rows() if row["defense"]["name"] == fault]
    assert row["status"] == "failed" and reason in row["reason"]
    assert all(value is None for value in row["metrics"].values())


def test_other_stacks_are_not_affected(finished: Run) -> None:
    (row,) = [row for row in finished.rows() if row["defense"]["name"] == "none"]
    assert row["status"] == "ok" and row["metrics"]["psnr"] > 0


def test_the_report_is_written_all_the_same(finished: Run, tmp_path: Path) -> None:
    page = finished.report.read_text()
    assert "zero everywhere" in page and "non-finite" in page
