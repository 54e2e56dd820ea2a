"""Attacks on NTK regressions in a whole run: from a scenario over images to the leaderboard."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import fedsim
from fedsim.recording.truth import load_truth
from fedsim.report import leaderboard_rows, positive_controls
from fedsim.results.record import Row, Run
from fedsim.types import RowTruth

pytestmark = [pytest.mark.by_hand, pytest.mark.usefixtures("attacks_here")]

FAR = [
    {"name": "gaussian_sampling", "beta": 0.01, "lift": 3, "samples": 199},
    {"name": "truncated_laplace", "beta": 0.01, "epsilon": 0.7, "delta": 4e-4},
]
SCENARIO: dict[str, Any] = {
    "name": "kernels",
    "seed": 5,
    "data": {"source": {"name": "digits", "size": 8}, "clients": 8},
    "learner": {"name": "ntk", "ridge": 1.0},
    "training": {"rounds": 1},
    "defenses": {"none": [], "far": FAR},
    "attacks": [{"name": "row_reconstruction", "samples": 20}, "membership_inference"],
    "observe": {"batch_sizes": [8], "trials": 2, "clients": [0]},
    "knowledge": {"rows": "others"},
    "privacy": {"delta": 1e-3},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(SCENARIO, out=tmp_path_factory.mktemp("run") / "out", workers=1)


def rows_of(run: Run, stack: str, attack: str) -> list[Row]:
    return [
        row
        for row in run.rows()
        if (row["defense"]["name"], row["attack"]["name"]) == (stack, attack)
    ]


def test_undefended_rows_are_told_whole_and_the_control_passes(finished: Run) -> None:
    for row in rows_of(finished, "none", "row_reconstruction"):
        assert row["metrics"]["rows_recovered"] == row["metrics"]["label_accuracy"] == 1
        assert row["baseline"]["rows_recovered"] < 0.2 > row["metrics"]["row_error"]
        assert row["control"]["other_update"]["row_error"] > 0.3
    for row in rows_of(finished, "none", "membership_inference"):
        assert row["metrics"]["membership_auc"] == 1
    (control,) = positive_controls(leaderboard_rows([finished.out]))
    assert control.status == "passed"


def test_a_claim_against_a_small_move_bounds_no_membership(finished: Run) -> None:
    """ε is finite and says nothing of which of two images took part: there is no limit to show."""
    for row in rows_of(finished, "far", "membership_inference"):
        assert row["privacy"]["relation"] == "close" and 0 < row["privacy"]["epsilon"] < 1
        assert row["theory"]["membership_auc"] is row["theory"]["membership_tpr"] is None
        assert row["metrics"]["membership_auc"] > 0.9
    for row in rows_of(finished, "far", "row_reconstruction"):
        assert 0.01 < row["metrics"]["row_error"] < row["baseline"]["row_error"]
        assert row["metrics"]["label_accuracy"] == 1


def test_the_recording_declares_the_noise_and_no_row(finished: Run) -> None:
    (path,) = [p for p in finished.observations() if p.match("far/*/client-0000-b8-t0.json")]
    told = json.loads(path.read_text())["release"]
    assert set(told["statistics"]) == {"features", "kernel"}
    assert told["statistics"]["features"]["scale"] == pytest.approx(0.0487, rel=0.01)
    assert told["counted"] and len(told["names"]) == 74
    seen = fedsim.load_observation(path)
    assert set(seen.update) == {"form"} and set(seen.buffers) == {"kernel"}
    truth = load_truth(finished.out, seen.id)
    assert isinstance(truth, RowTruth) and truth.classes == 10
    assert truth.scored.tolist() == [True] * 64 + [False] * 10
    lengths = torch.linalg.vector_norm(truth.rows[:, :64], dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    assert bool((truth.rows[:, 64:].sum(1) == 1).all())
