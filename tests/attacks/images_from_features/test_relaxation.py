"""Images and maps of all stages descended together: zero at the truth, and led there."""

from __future__ import annotations

from typing import Any, Literal

import torch
from deep_victims import VICTIMS, observe
from torch import Tensor

from fedsim import rng
from fedsim.models.base import normalize
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.images_from_features._body_gradient import (
    BodyGradient,
    LaterSteps,
    as_one_gradient,
)
from fedsim_attacks.images_from_features._heads import signals
from fedsim_attacks.images_from_features._stage_descents import Relaxation
from fedsim_attacks.images_from_features._stages import StagedBody


def relaxation(
    observation: Observation,
    truth: GroundTruth,
    images: Tensor,
    maps: list[Tensor],
    steps: int = 1,
    width: float = 0.0,
    noise: float = 0.0,
    later: LaterSteps | None = None,
) -> tuple[Relaxation, list[Tensor]]:
    """And the true images and maps."""
    assert truth.features is not None
    stream = rng.generator(0, "stages")
    staged = StagedBody(observation, observation.num_images, stream, width=width)
    known = signals(observation, truth.features)
    made = Relaxation(
        observation,
        staged,
        truth.features,
        known,
        images,
        maps,
        noise=noise,
        later=later,
        steps=steps,
    )
    return made, staged.maps(normalize(truth.images, observation.model))


@VICTIMS
def test_relaxed_stages_are_zero_at_the_truth(
    defense: list[dict[str, Any]], mode: Literal["train", "eval"], norm: str
) -> None:
    observation, truth = observe(defense, 4, mode, norm=norm)
    images = normalize(truth.images, observation.model)
    right, true = relaxation(observation, truth, images, [])
    misfit = right(images)
    assert float(misfit.update) < 1e-6
    assert float(misfit.features) < 1e-6
    wrong, _ = relaxation(observation, truth, images, [each.flip(0) for each in true[1:-1]])
    assert float(wrong(images).update) > 1e-2


@VICTIMS
def test_what_later_steps_add_is_simulated(
    defense: list[dict[str, Any]], mode: Literal["train", "eval"], norm: str
) -> None:
    """An update of three steps is no gradient; corrected at the truth, nothing is left of it."""
    observation, truth = observe(defense, 4, mode, norm=norm, steps=3, lr=5e-4)
    images = normalize(truth.images, observation.model)
    later = LaterSteps(observation, truth.labels)
    one = as_one_gradient(observation)
    relaxed, _ = relaxation(one, truth, images, [], steps=10, later=later)
    misfits = [relaxed(images) for _ in range(5)]
    assert [misfit.target_changed for misfit in misfits] == [False] * 4 + [True]
    before = float(misfits[0].update)
    assert before > 1e-3
    # Maps have moved by then: a new one that is corrected at once tells what is left.
    again, _ = relaxation(one, truth, images, [], steps=1, later=later)
    for update in again._updates:
        update.correct(later.share, later(images))
    assert float(again(images).update) < 1e-4 * before


def test_maps_of_images_leave_the_misfit_of_the_whole_body() -> None:
    """Error signals run back through all stages, and so does the slope."""
    observation, truth = observe([])
    assert truth.features is not None
    known = signals(observation, truth.features)
    images = torch.randn(2, 3, 32, 32, generator=rng.generator(0, "images"))
    whole = BodyGradient(observation, truth.features, known, weight=1.0, width=0.0, calls=1)
    relaxed, _ = relaxation(observation, truth, images, [])
    misfit, expected = relaxed(images), whole(images)
    torch.testing.assert_close(misfit.update, expected.update)
    torch.testing.assert_close(misfit.features, expected.features)


def test_maps_are_taken_up_to_a_factor_of_each_image() -> None:
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    _, true = relaxation(observation, truth, images, [])
    factors = torch.tensor([0.3, 4.0]).view(2, 1, 1, 1)
    relaxed, _ = relaxation(observation, truth, images, [factors * each for each in true[1:-1]])
    misfit = relaxed(images)
    assert float(misfit.update) < 1e-6
    assert float(misfit.features) < 1e-6


def test_maps_follow_their_images() -> None:
    """From images at the truth and maps a tenth off, maps come back."""
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    _, true = relaxation(observation, truth, images, [])
    streams = rng.generator(0, "maps")
    off = [
        (each + 0.1 * each.std() * torch.randn(each.shape, generator=streams)).clamp_min(0)
        for each in true[1:-1]
    ]
    relaxed, _ = relaxation(observation, truth, images, off, steps=60, width=1.0)
    misfits = [relaxed(images) for _ in range(60)]
    assert float(misfits[-1].features) < 0.1 * float(misfits[0].features)
    assert float(misfits[-1].update) < 0.2 * float(misfits[0].update)
