"""Projected gradient descent: the server's weights stay in a ball around the first ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_scenario

import fedsim
from fedsim.contracts.defense import global_norm
from fedsim.recording.files import read_tensors
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import FedsimError

BASE = tiny_scenario(
    model={"name": "kan", "hidden": 2, "intervals": 2},
    training={"rounds": 2, "local": {"batch_size": 4, "lr": 20.0}},
)


def workload(radius: float | None, **training: Any) -> Workload:
    changed = {**BASE["training"], "projection_radius": radius, **training}
    return Workload(resolve({**BASE, "training": changed}), "none")


def test_the_nearest_point_of_the_ball() -> None:
    plain, held = workload(None), workload(2.0)
    start, _ = held.initial()
    stream = torch.Generator().manual_seed(0)
    step = {name: torch.randn(value.shape, generator=stream) for name, value in start.items()}
    length = float(global_norm(step))
    for scale in (0.5, 1.999, 2.001, 30.0):
        mean = {name: start[name] + scale / length * step[name] for name in start}
        weights = held.computation.finalize(mean, 1)
        expected = {name: start[name] + min(scale, 2.0) / length * step[name] for name in start}
        torch.testing.assert_close(dict(weights), expected)
        assert plain.computation.finalize(mean, 1) is mean


def test_a_federation_stays_in_the_ball(tmp_path: Path) -> None:
    weights = {}
    for radius in (None, 0.25):
        changed = {**BASE["training"], "projection_radius": radius}
        fedsim.run(resolve({**BASE, "training": changed}), out=tmp_path / str(radius))
        tensors = read_tensors(tmp_path / str(radius) / "checkpoints/none.safetensors")
        start, _ = workload(radius).initial()
        moved = {name: tensors[f"parameter.{name}"] - value for name, value in start.items()}
        weights[radius] = float(global_norm(moved))
    assert weights[None] > 0.5
    assert weights[0.25] == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"projection_radius": 1.0, "local": {"steps": 2}}},
        {
            "training": {"projection_radius": 1.0},
            "defenses": {"a": [{"name": "local_aggregation", "steps": 2}]},
        },
    ],
)
def test_local_steps_cannot_be_projected(changes: dict[str, Any]) -> None:
    with pytest.raises(FedsimError, match="would go unprojected"):
        resolve({**BASE, **changes})
