"""What later local steps add to the first: exact at the truth, whatever the training."""

from __future__ import annotations

from collections.abc import Mapping
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


def test_one_step_has_no_later_ones() -> None:
    observation, truth = observe(steps=1)
    added = LaterSteps(observation, truth.labels)(normalize(truth.images, observation.model))
    for name, each in added.items():
        assert float(each.norm()) < 1e-4 * float(as_one_gradient(observation).update[name].norm())


class Told:
    """What it was told."""

    def __init__(self) -> None:
        self.share: list[float] = []

    def correct(self, share: float, added: Mapping[str, Tensor]) -> None:
        self.share.append(share)


def test_updates_are_corrected_from_when_images_are_near() -> None:
    observation, truth = observe()
    later, told = LaterSteps(observation, truth.labels), Told()
    images = normalize(truth.images, observation.model)
    times = [n for n in range(90) if later.correct([told], images, n, 90)]
    assert times == list(range(36, 90, 3))
    assert told.share == [later.share] * len(times)


def test_a_simulation_that_runs_away_is_not_told() -> None:
    observation, truth = observe(lr=1e12)
    told = Told()
    images = normalize(truth.images, observation.model)
    assert not LaterSteps(observation, truth.labels).correct([told], images, 8, 9)
    assert not told.share


class Whole:
    """A body all of whose weights meet images."""

    def without_padding(self, name: str, tensor: Tensor) -> Tensor:
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
        return PartUpdate(observation, Whole(), part, torch.ones(()), approximate=rough)  # type: ignore[arg-type]

    def exceeds(update: PartUpdate, by: Tensor) -> float:
        return float(update.compared([by])[0][0].norm() / seen.norm())

    rough = made(True)
    assert exceeds(rough, 5 * seen) < 1e-5
    assert rough.compared([5 * seen])[1] == pytest.approx(0.2)
    assert exceeds(made(False), 5 * seen) > 1
    # Whatever is added, the sum is compared, as it is.
    added = torch.where(seen == 0, 0, 0.4 * seen.flip(0))
    right = (seen - added) / 0.25
    rough.correct(0.25, {name: added})
    assert exceeds(rough, right) < 1e-5
    assert exceeds(rough, 2 * right) > 0.1
    assert rough.compared([right])[1] == 0.25


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
        return float(update.compared([at + step * along])[0][0].double().square().sum())

    (left,), pull = update.compared([at])
    told = float((2 * pull * left * along).sum())
    # Narrower differences drown in the rounding of some processors, wider ones in curvature.
    assert told == pytest.approx((square(0.03) - square(-0.03)) / 0.06, rel=5e-3)
    assert (pull == 0.25) == corrected
