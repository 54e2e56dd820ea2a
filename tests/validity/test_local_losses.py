"""What local training does to its own loss is told beside every figure, which it may mislead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedsim
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_observation, path_of
from fedsim.recording.truth import load_truth
from fedsim.report import load_runs
from fedsim.scenario import resolve
from fedsim.types import Observation

pytestmark = pytest.mark.usefixtures("attacks_here")

STEPS = {"name": "local_aggregation", "steps": 3, "batches": "same"}


def loss_at(seen: Observation, images: Tensor, labels: Tensor, moved: float) -> float:
    """Of the model whose weights have gone `moved` times the update."""
    model = rebuild(seen)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(seen.update[name], alpha=moved)
        return float(F.cross_entropy(model(normalize(images, seen.model)), labels))


@pytest.mark.parametrize(("lr", "diverges"), [(0.001, False), (2.0, True)])
def test_losses_before_and_after_are_those_of_the_recorded_update(
    lr: float, diverges: bool, tmp_path: Path
) -> None:
    scenario = {
        "name": "s",
        "data": {"source": "digits", "clients": 1},
        "model": "lenet",
        "training": {"rounds": 1, "local": {"batch_size": 8, "lr": lr}},
        "defenses": {"none": [], "steps": [STEPS]},
        "attacks": ["label_inference"],
        "observe": {"rounds": [1], "batch_sizes": [4], "trials": 2},
    }
    run = fedsim.run(resolve(scenario), out=tmp_path / "run")
    for row, read in zip(run.rows(), load_runs([run.out])[0].rows, strict=True):
        losses = row["utility"]["local_losses"]
        assert read.utility is not None
        if row["defense"]["name"] == "none":
            assert losses is None and not read.utility.diverged
            continue
        seen = load_observation(path_of(run.out, row["observation"]))
        truth = load_truth(run.out, row["observation"])
        assert isinstance(truth, fedsim.types.GroundTruth)
        expected = [loss_at(seen, truth.images, truth.labels, moved) for moved in (0.0, 1.0)]
        assert [float(loss) for loss in losses] == pytest.approx(expected, rel=1e-4)
        assert read.utility.diverged == diverges
