"""What later local steps add to the first: exact at the truth, whatever the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_victims import HEAD, photos
from torch import Tensor

from fedsim.adversary import rebuild
from fedsim.models.base import normalize
from fedsim.models.local import gradient, loss_function
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.body_gradient import Part, PartUpdate
from fedsim_attacks.later_steps import LaterSteps
from fedsim_attacks.unrolled_update import as_one_gradient


def observe(**training: Any) -> tuple[Observation, GroundTruth]:
    """Four photographs in steps of 0.05."""
    fields: dict[str, Any] = {"algorithm": "fedavg", "steps": 3, "batch_size": 4, "lr": 0.05}
    return make_observation(
        *photos(4),
        model="convnet",
        model_parameters={"width": 8, "head": HEAD},
        training=LocalTraining(**{**fields, "batches": "same", **training}),
    )


def first_gradient(observation: Observation, truth: GroundTruth) -> dict[str, Tensor]:
    loss = loss_function(rebuild(observation), dict(observation.buffers), observation.training)
    images = normalize(truth.images, observation.model)
    return gradient(loss, dict(observation.parameters), images, truth.labels)


@pytest.mark.parametrize(
    ("training", "share"),
    [
        ({}, 1 / 3),
        ({"momentum": 0.9}, 2.71 / (2.71 + 1.9 + 1)),
        ({"steps": 2, "batch_size": 2, "batches": "different"}, 1.0),
    ],
    ids=["same batch", "momentum", "batches of their own"],
)
def test_first_and_later_steps_are_the_update(training: dict[str, Any], share: float) -> None:
    observation, truth = observe(**training)
    later = LaterSteps(observation, truth.labels)
    assert later.share == pytest.approx(share)
    first = first_gradient(observation, truth)
    added = later(normalize(truth.images, observation.model))
    for name, seen in as_one_gradient(observation).update.items():
        if added[name].shape == seen.shape:  # the others leave out what meets padding alone
            made = share * first[name] + added[name]
            torch.testing.assert_close(made, seen, rtol=1e-4, atol=1e-5 * float(seen.abs().max()))
    assert float(added["body.0.weight"].norm()) > 0.1 * float(first["body.0.weight"].norm())


def test_one_step_has_no_later_ones() -> None:
    observation, truth = observe(steps=1)
    added = LaterSteps(observation, truth.labels)(normalize(truth.images, observation.model))
    for name, each in added.items():
        assert float(each.norm()) < 1e-4 * float(as_one_gradient(observation).update[name].norm())


class Whole:
    """A body all of whose weights meet images."""

    def live(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("defense", [[], [{"name": "gradient_pruning", "ratio": 0.5}]])
def test_a_rough_update_is_compared_with_as_much_of_a_gradient_as_fits(
    defense: list[dict[str, Any]],
) -> None:
    observation, _ = make_observation(
        *photos(2), model="convnet", model_parameters={"width": 8, "head": HEAD}, defense=defense
    )
    name = "body.3.weight"
    part = Part(lambda images: images, [(name, observation.parameters[name])])
    seen = observation.update[name]

    def made(rough: bool) -> PartUpdate:
        return PartUpdate(observation, Whole(), part, torch.ones(()), rough=rough)  # type: ignore[arg-type]

    rough = made(True)
    assert float(rough.left([5 * seen])[0].norm()) < 1e-5 * float(seen.norm())
    assert float(made(False).left([5 * seen])[0].norm()) > float(seen.norm())
    # Whatever is added, the sum is compared, as it is.
    added = {name: torch.where(seen == 0, 0, 0.4 * seen.flip(0))}
    rough.correct(0.25, added)
    right = (seen - added[name]) / 0.25
    assert float(rough.left([right])[0].norm()) < 1e-5 * float(seen.norm())
    assert float(rough.left([2 * right])[0].norm()) > 0.1 * float(seen.norm())
