"""Bodies in stages, and peeled: zero at the truth, and led there."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from deep_victims import HEAD, VICTIMS, observe, of
from torch import Tensor

from fedsim import rng
from fedsim.models.base import normalize
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.images_from_features._body_gradient import PartGradient
from fedsim_attacks.images_from_features._heads import signals
from fedsim_attacks.images_from_features._stage_descents import StagePeeling
from fedsim_attacks.images_from_features._stages import Stage, StagedBody


def maps(cut: list[Stage], observation: Observation, truth: GroundTruth) -> list[Tensor]:
    """What goes into each stage of the true images, and what comes out of the last."""
    found = [normalize(truth.images, observation.model)]
    with torch.no_grad():
        for stage in cut:
            found.append(stage.part.function(found[-1]))
    return found


def test_stages_are_the_body() -> None:
    observation, truth = observe([])
    _, cut = of(observation)
    assert len(cut) > 4
    names = [name for stage in cut for name, _ in stage.part.parameters]
    assert names == [name for name in observation.parameters if name.startswith("body.")]
    found = maps(cut, observation, truth)
    assert truth.features is not None
    torch.testing.assert_close(found[-1].flatten(1), truth.features, rtol=1e-4, atol=1e-4)
    assert [stage.shape for stage in cut] == [each.shape for each in found[:-1]]
    assert [stage.positive for stage in cut] == [False] + [True] * (len(cut) - 1)


@pytest.mark.parametrize(
    ("model", "count", "parameters"),
    [
        ("convnet", 64, {}),
        ("resnet18", 2, {"stem": "imagenet", "head": {**HEAD, "unit_features": True}}),
    ],
    ids=["more unknown than known", "features made of what comes out"],
)
def test_what_is_not_determined_is_not_cut(
    model: str, count: int, parameters: dict[str, Any]
) -> None:
    observation, truth = observe([], count, model=model, **parameters)
    _, cut = of(observation)
    assert len(cut) == 1
    assert truth.features is not None
    found = maps(cut, observation, truth)[-1]
    torch.testing.assert_close(found.flatten(1), truth.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [0.0, 1.0])
@VICTIMS
def test_every_stage_is_zero_at_the_truth(
    defense: list[dict[str, Any]], mode: Literal["train", "eval"], norm: str, width: float
) -> None:
    """Outputs, error signals and gradients fit, and each stage poses the one before."""
    # Of two images on maps of one pixel, batch norm in train mode leaves signs.
    observation, truth = observe(defense, 4, mode, norm=norm)
    body, cut = of(observation, width)
    found = maps(cut, observation, truth)
    assert truth.features is not None
    known = signals(observation, truth.features)
    outputs, errors = truth.features, known.errors
    for i in reversed(range(len(cut))):
        free = i < len(cut) - 1
        gradient = PartGradient(
            observation,
            body,
            cut[i].part,
            # Known up to a factor, which the inputs tell.
            outputs * 3 if free else outputs,
            errors / 3 if free else errors,
            scale=known.scale,
            weight=1.0,
            calls=1,
            unscaled=free,
        )
        right = gradient(found[i])
        assert float(right.update) < 1e-6
        assert float(right.features) < 1e-6
        wrong = gradient(found[i].flip(0))
        assert float(wrong.update) + float(wrong.features) > 1e-3
        outputs, errors = gradient.pull_back(found[i])


def test_peeling_finds_what_went_into_every_stage() -> None:
    """Up to a factor for each image behind norm layers; from inputs drawn at random."""
    observation, truth = observe([])
    _, cut = of(observation)
    true = maps(cut, observation, truth)
    assert truth.features is not None
    known, stream = signals(observation, truth.features), rng.generator(0, "peeling")
    staged = StagedBody(observation, 2, stream, width=1.0)
    peeling = StagePeeling(observation, staged, truth.features, known, stream, steps=400)
    losses = [float(peeling.step()) for _ in range(400)]
    assert peeling.unexplained <= min(losses[-20:])
    assert peeling.unexplained < 0.05
    assert len(peeling.maps) == len(cut) - 1
    for found, wanted in zip(peeling.maps, true[1:], strict=False):
        one, other = found.flatten(1), wanted.flatten(1)
        along = (one * other).sum(1) / one.norm(dim=1) / other.norm(dim=1)
        assert float(along.min()) > 0.97
