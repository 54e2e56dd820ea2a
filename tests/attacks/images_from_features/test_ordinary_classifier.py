"""Images behind an ordinary classifier: its features carry the inversion, where it tells them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Photos
from fedsim.models.base import normalize
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.observation import example_batch
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients
from fedsim_attacks.images_from_features._body_gradient import BodyGradient, Misfit
from fedsim_attacks.images_from_features._heads import recovered_if_told
from fedsim_attacks.images_from_features._signals import signals
from fedsim_attacks.images_from_features._whole_update import WholeGradient
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion

MODEL: dict[str, Any] = {"model": "convnet", "model_parameters": {"width": 8}}


def observe(defense: list[dict[str, Any]]) -> tuple[Observation, GroundTruth]:
    return make_observation(*example_batch(3), **MODEL, defense=defense)


@pytest.mark.parametrize("defense", [[], [{"name": "clip", "norm": 1e-3}]], ids=["none", "clip"])
def test_nothing_is_left_at_the_truth(defense: list[dict[str, Any]]) -> None:
    observation, truth = observe(defense)
    recovered = recovered_if_told(observation, Knowledge(), 0)
    assert recovered is not None and truth.features is not None
    features = recovered.features
    assert features is not None
    whose = torch.cdist(truth.features, features).argmin(1)
    assert sorted(whose.tolist()) == [0, 1, 2]
    known = signals(observation, features[whose])
    assert known.labels.tolist() == truth.labels.tolist()
    objective = BodyGradient(observation, features[whose], known, weight=1.0, width=0, calls=1)
    at_truth = objective(normalize(truth.images, observation.model))
    assert float(at_truth.update) < 1e-8
    assert float(at_truth.features) < 1e-8
    elsewhere = objective(normalize(truth.images.flip(0), observation.model))
    assert float(elsewhere.update) > 1e-2


def test_the_direction_of_the_whole_update_and_features_are_compared() -> None:
    observation, truth = observe([{"name": "clip", "norm": 1e-3}])
    assert truth.features is not None

    def evaluated(images: torch.Tensor, weight: float) -> Misfit:
        objective = WholeGradient(
            observation, truth.labels, width=0, calls=1, features=truth.features, weight=weight
        )
        return objective(images)

    at_truth = evaluated(normalize(truth.images, observation.model), 1.0)
    assert abs(float(at_truth.update)) < 1e-5
    assert float(at_truth.features) < 1e-8
    elsewhere = normalize(truth.images.flip(0), observation.model)
    assert float(evaluated(elsewhere, 0.0).update) > 1e-2
    # Features have no jumps, as the update's direction has: their differences tell their slope.
    pull = (evaluated(elsewhere, 2.0).slope - evaluated(elsewhere, 0.0).slope) / 2
    step = 1e-2 * pull / pull.norm()
    after, before = (evaluated(elsewhere + sign * step, 1.0).features for sign in (1, -1))
    assert float(after - before) / 2e-2 == pytest.approx(float(pull.norm()), rel=0.1)


def test_a_few_iterations_are_nearer_than_twice_as_many_of_inverting_gradients() -> None:
    photos = Photos().load()
    images = photos.train_images[31:211:60].float() / 255
    observation, truth = make_observation(images, photos.train_labels[31:211:60], **MODEL)
    granted = Knowledge(grant=Grant(labels="inferred"))
    factored, matched = (
        solve(attack, observation, granted, seed=1).reconstruction
        for attack in (FactoredInversion(iterations=80), InvertingGradients(iterations=160))
    )
    gain = float(score(factored, truth)["psnr"] or 0) - float(score(matched, truth)["psnr"] or 0)
    assert gain > 1


def test_images_are_as_near_as_behind_a_planted_head() -> None:
    photos = Photos().load()
    images = photos.train_images[:180:60].float() / 255
    planted = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
    found = []
    for more in ({}, {"head": planted}):
        parameters = {**MODEL["model_parameters"], **more}
        observation, truth = make_observation(
            images, photos.train_labels[:180:60], model="convnet", model_parameters=parameters
        )
        attack = FactoredInversion(iterations=120)
        answer = solve(attack, observation, Knowledge(), seed=1).reconstruction
        found.append(float(score(answer, truth)["psnr"] or 0))
    assert found[0] > found[1] - 1
    assert found[0] > 10


def test_where_no_feature_is_told_the_whole_update_is_compared() -> None:
    images, labels = example_batch(3)
    observation, truth = make_observation(images, labels % 2, **MODEL, num_classes=2)
    assert recovered_if_told(observation, Knowledge(), 0) is None
    answer = solve(FactoredInversion(iterations=20), observation, Knowledge(), 1).reconstruction
    assert answer.features is None and answer.images is not None
    assert answer.images.shape == truth.images.shape
