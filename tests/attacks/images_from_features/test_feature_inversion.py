"""The paper's image attack: each term is zero at the truth, and its U-Net is what it says."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import GroundTruth, Observation
from fedsim_attacks.gradient_matching._drawing import UNet
from fedsim_attacks.gradient_matching._image_priors import ForwardPrior, KnownFeatures
from fedsim_attacks.gradient_matching._matching import Matching, reweighted_cosine

HEAD = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}


def observe(norm: str = "batch") -> tuple[Observation, GroundTruth]:
    parameters: dict[str, Any] = {"width": 8, "norm": norm, "head": HEAD}
    return make_observation(*example_batch(3), model="convnet", model_parameters=parameters)


def test_the_reweighted_objective_is_zero_at_the_truth_alone() -> None:
    observation, truth = observe()
    counts = [float(t.numel()) for t in observation.parameters.values()]
    matching, distance = Matching(observation), reweighted_cosine(counts)
    for images, least, most in ((truth.images, -1e-6, 1e-6), (1 - truth.images, 1e-2, 2)):
        candidate = matching.candidate(normalize(images, observation.model), truth.labels, None)
        assert least < float(matching.differentiate(candidate, distance)[0]) < most


def test_reweighting_is_the_weighted_mean_of_cosines() -> None:
    """Its derivative in closed form is autograd's."""
    observation, _ = observe("group")
    target = Matching(observation)._target
    update = [torch.randn_like(t).requires_grad_() for t in target.tensors]
    weights = [1.0 + i for i in range(len(update))]
    loss, direction, scale = reweighted_cosine(weights)([u.detach() for u in update], target)
    parts = [
        weight * (1 - F.cosine_similarity(u.flatten(), t.flatten(), dim=0))
        for weight, u, t in zip(weights, update, target.tensors, strict=True)
    ]
    wanted = torch.stack(parts).sum() / sum(weights)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    slopes = torch.autograd.grad(wanted, update)
    for found, slope in zip(direction, slopes, strict=True):
        assert torch.allclose(scale * found, slope, atol=1e-7)


@pytest.mark.parametrize("measure", ["squared_cosine", "relative"])
def test_the_features_term_is_zero_at_the_truth(
    measure: Literal["squared_cosine", "relative"],
) -> None:
    observation, truth = observe()
    assert truth.features is not None
    prior = ForwardPrior(observation, Knowledge(), KnownFeatures(truth.features, measure))
    assert float(prior(normalize(truth.images, observation.model))[0]) < 1e-6
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > 1e-4
    value, slope = ForwardPrior(observation, Knowledge(), None)(truth.images)
    assert float(value) == 0
    assert not slope.any()


def test_equation_2_does_not_see_signs_or_norms() -> None:
    found, known = torch.randn(2, 4, 6).unbind()
    cosine = KnownFeatures(known, "squared_cosine").misfit(found)
    assert torch.isclose(KnownFeatures(-3 * known, "squared_cosine").misfit(found), cosine)
    relative = KnownFeatures(known, "relative").misfit(found)
    assert not torch.isclose(KnownFeatures(-3 * known, "relative").misfit(found), relative)


@pytest.mark.parametrize("bn", ["exact", "inferred"])
def test_the_batch_norm_term_is_least_at_the_truth(bn: str) -> None:
    """Zero for exact statistics; inferred variances are unbiased, which adds a little."""
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least(bn=bn))
    prior = ForwardPrior(seen, knowledge, None, batch_norm=1.0)
    right = float(prior(normalize(truth.images, observation.model))[0])
    assert right < (1e-4 if bn == "exact" else 0.5)
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > right + 0.5


def test_ungranted_statistics_are_not_used() -> None:
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least())
    assert float(ForwardPrior(seen, knowledge, None, batch_norm=1.0)(truth.images)[0]) == 0


@pytest.mark.parametrize(
    ("shape", "levels"), [((3, 32, 32), 4), ((1, 16, 16), 3), ((3, 64, 64), 5), ((1, 25, 25), 1)]
)
def test_the_network_halves_down_to_four_pixels(shape: tuple[int, int, int], levels: int) -> None:
    network = UNet(2, shape, 5, 8)
    features = torch.randn(2, 5)
    drawn = network(features)
    assert drawn.shape == (2, *shape)
    assert bool(((drawn > 0) & (drawn < 1)).all())
    assert len(network.down) == levels
    assert not torch.equal(drawn, network(-features))
    attention = [m for m in network.modules() if type(m).__name__ == "_PixelAttention"]
    expected = {32: 2, 16: 2, 64: 2, 25: 0}[shape[1]]
    assert len(attention) == expected
    assert any(isinstance(m, nn.GroupNorm) for m in network.modules())
