"""A hostile attack searches its process for truth, and for a path to it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins_here import Idle, registered
from tiny import tiny_scenario

import fedsim
from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.results.record import Run
from fedsim.types import GroundTruth, Observation, Reconstruction, RowTruth

_NAME = ("the", "victims", "folder")
"""Of the run's folder, in parts, so that this module's constants are not what is found."""


def searched() -> list[str]:
    """Whatever of this process is truth, or leads to it."""
    name = "-".join(_NAME)
    found = set()
    places: list[Any] = [*gc.get_objects(), sys.argv, dict(os.environ)]
    for frame in sys._current_frames().values():
        while frame is not None:  # type: ignore[redundant-expr]
            places.append(list(frame.f_locals.values()))
            frame = frame.f_back  # type: ignore[assignment]
    # Only types are looked at, since some proxies warn when anything else is.
    found.update(t.__name__ for t in map(type, places) if t in (GroundTruth, RowTruth))
    # Most strings are held by many: each is looked at once.
    held = {id(one): one for one in gc.get_referents(*places)}
    for one in held.values():
        if issubclass(type(one), str | bytes | Path) and one is not name:
            text = one.decode("latin-1") if isinstance(one, bytes) else str(one)
            if name in text:
                found.add(f"{type(one).__name__}: {text[:200]}")
    return sorted({*found, *(name for name in sys.modules if name == "fedsim.recording.truth")})


class Quiet(Idle):
    """Answers pixels of no image that there could be."""

    def postprocess(self, state: AttackState) -> Reconstruction:
        return Reconstruction(images=torch.zeros(1, 9, 9, 9), loss=0.0, iterations=7)


class Spy(Quiet):
    """Says what it found in its process."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> AttackState:
        raise AttackFailed(f"in process {os.getpid()}: {searched()}")


SCENARIO = tiny_scenario(
    training__local={"batch_size": 2},
    attacks=["spy", "quiet"],
    observe={"batch_sizes": [1]},
    knowledge={"labels": "known"},
)


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("run") / "-".join(_NAME)
    own = {"attacks": {"quiet": Quiet, "spy": Spy}}
    with pytest.MonkeyPatch.context() as patch, registered(own):
        patch.setattr(sys, "argv", ["fedsim", "run", "--out", str(out)])
        return fedsim.run(SCENARIO, out=out, workers=request.param)


def test_no_truth_and_no_way_to_it_is_where_an_attack_runs(finished: Run) -> None:
    (row,) = [row for row in finished.rows() if row["attack"]["name"] == "spy"]
    assert row["status"] == "failed" and not any(row["metrics"].values())
    process, _, found = row["reason"].partition(": ")
    assert process.startswith("in process ") and process != f"in process {os.getpid()}"
    assert found == "[]"


def test_whoever_scores_holds_both(finished: Run) -> None:
    """Else the test above could not fail."""
    from fedsim.recording.truth import load_truth

    (row,) = [row for row in finished.rows() if row["attack"]["name"] == "spy"]
    truth = load_truth(finished.out, row["observation"])
    found = searched()
    assert {type(truth).__name__, "fedsim.recording.truth"} <= set(found)
    assert any(name.startswith(("str: ", "PosixPath: ")) for name in found)


def test_what_cannot_be_scored_has_cost_all_the_same(finished: Run) -> None:
    (row,) = [row for row in finished.rows() if row["attack"]["name"] == "quiet"]
    assert row["status"] == "failed"
    assert row["cost"]["iterations"] == 7
    assert row["cost"]["seconds"] > 0
    assert row["baseline"]["name"] is not None
