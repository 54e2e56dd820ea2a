"""What later local steps add to the first: exact at the truth, whatever the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_victims import HEAD, photos
from torch import Tensor

from fedsim import rng
from fedsim.models.base import normalize
from fedsim.models.local import gradient, loss_function
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.classifier_features._local_steps import as_one_gradient
from fedsim_attacks.images_from_features._body_gradient import LaterSteps, Part, PartUpdate


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
            # In the norm: single entries differ where a step crosses the kink of a ReLU.
            assert float((made - seen).norm()) < 1e-3 * float(seen.norm())
    assert float(added["body.0.weight"].norm()) > 0.1 * float(first["body.0.weight"].norm())


class Whole:
    """A body all of whose weights meet images."""

    def without_padding(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("corrected", [False, True])
def test_what_is_left_grows_as_told(corrected: bool) -> None:
    """Compared with differences of it, at the best fit and with something added."""
    observation, _ = make_observation(
        *photos(2), model="convnet", model_parameters={"width": 8, "head": HEAD}
    )
    name = "body.3.weight"
    part = Part(lambda images: images, [(name, observation.parameters[name])])
    update = PartUpdate(observation, Whole(), part, torch.ones(()), approximate=True)  # type: ignore[arg-type]
    seen, stream = observation.update[name], rng.generator(0, "slope")
    at, along, added = (
        float(seen.std()) * torch.randn(seen.shape, generator=stream) for _ in "abc"
    )
    at = at + 2 * seen
    if corrected:
        update.correct(0.25, {name: added})

    def square(step: float) -> float:
        return float(update.compare([at + step * along])[0][0].double().square().sum())

    (left,), pull = update.compare([at])
    told = float((2 * pull * left * along).sum())
    # Narrower differences drown in the rounding of some processors, wider ones in curvature.
    assert told == pytest.approx((square(0.03) - square(-0.03)) / 0.06, rel=5e-3)
    assert (pull == 0.25) == corrected
