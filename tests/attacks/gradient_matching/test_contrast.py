"""Contrast that no update shows: given back where images are told, and not where guessed."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from deep_victims import observe

from fedsim import rng
from fedsim.contracts.grant import Knowledge
from fedsim_attacks.gradient_matching._image_priors import expose, trusted_contrast
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.images_from_features._heads import noise_share
from fedsim_attacks.images_from_features._stages import StagedBody
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion


def test_contrast_is_seen_where_the_first_layer_has_a_bias_or_no_norm_layer() -> None:
    def seen(norm: str, mode: Literal["train", "eval"], **model: Any) -> float:
        observation, _ = observe([], norm=norm, mode=mode, **model)
        stream = rng.generator(0, "stages")
        return StagedBody(observation, 2, stream, width=0.0).contrast_seen

    assert seen("group", "train") < 1e-3
    assert seen("batch", "train") > 0.15  # one image's against the other's
    assert seen("batch", "eval") > 0.5
    assert 1e-3 < seen("group", "train", model="convnet") < 0.15  # by its bias
    assert seen("none", "train", model="convnet") > 1


def test_exposed_images_are_those_of_any_contrast() -> None:
    low, high = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    images = torch.rand(4, 3, 32, 32, generator=rng.generator(0, "exposed")) * 4.5 - 2
    found = expose(images, (low, high))
    torch.testing.assert_close(found, images, rtol=0.02, atol=0)
    factors = torch.tensor([0.3, 0.7, 1.0, 2.0]).view(4, 1, 1, 1)
    torch.testing.assert_close(expose(factors * images, (low, high)), found)
    assert torch.equal(expose(torch.zeros(1, 3, 4, 4), (low, high)), torch.zeros(1, 3, 4, 4))


def test_the_less_an_image_is_told_the_less_contrast_it_gets() -> None:
    assert trusted_contrast(0.0) == 1
    assert 1 > trusted_contrast(0.3) > trusted_contrast(0.6) > trusted_contrast(0.99) > 0
    assert trusted_contrast(1.0) == trusted_contrast(1.2) == 0  # an estimate may exceed all
    images = torch.rand(2, 3, 8, 8, generator=rng.generator(0, "exposed")) - 0.5
    box = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    torch.testing.assert_close(expose(images, box, 0.4), 0.4 * expose(images, box))


@pytest.mark.parametrize("std", [0.0, 1e-3, 0.1])
def test_the_noise_in_a_part_is_found(std: float) -> None:
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    clear, _ = observe([])
    observation, _ = observe(defense)
    seen = HeadGradient.of(observation)
    name = "body.conv1.weight"
    noise = observation.update[name] - clear.update[name]
    share = float(noise.square().sum() / observation.update[name].square().sum())
    assert noise_share(observation, seen, [name]) == pytest.approx(share, rel=0.1)
    whole = [each for each in observation.update if each.startswith("body.")]
    assert noise_share(observation, seen, whole) == pytest.approx(noise_share(observation, seen))


def test_contrast_follows_the_noise_in_the_first_stage() -> None:
    attack, found = FactoredInversion(iterations=1), []
    for defense in ([], [{"name": "gaussian_noise", "std": 1e-2}]):
        observation, _ = observe(defense)
        state = attack.step(attack.init(observation, Knowledge(), rng.generator(0, "phases")))
        contrast = state.phase.contrast
        assert contrast is not None
        expected = state.matching.pixels(expose(state.best, state.matching.box, contrast))
        images = attack.postprocess(state).images
        assert images is not None
        torch.testing.assert_close(images, expected)
        found.append(contrast)
    whole = trusted_contrast(noise_share(observation, HeadGradient.of(observation)))
    assert found[0] == 1
    assert whole < found[1] < 1  # early stages stand out of noise


@pytest.mark.parametrize(
    ("norm", "std", "contrast"),
    [("group", 0.0, None), ("group", 0.01, 1.0), ("group", 0.3, 1.0), ("none", 0.3, None)],
)
def test_contrast_that_total_variation_takes_is_given_back(
    norm: str, std: float, contrast: float | None
) -> None:
    """Where noise asks for much of it and group norm leaves contrast hard to see."""
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    observation, _ = observe(defense, norm=norm, model="convnet")
    attack = FactoredInversion(iterations=1)
    state = attack.step(attack.init(observation, Knowledge(), rng.generator(0, "phases")))
    assert state.phase.contrast == contrast
    images = attack.postprocess(state).images
    assert images is not None
    box = state.matching.box
    shown = expose(state.best, box) if contrast else state.best
    torch.testing.assert_close(images, state.matching.pixels(shown))
    assert contrast is None or not torch.allclose(shown, state.best)
