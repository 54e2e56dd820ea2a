"""The paper's image attack: each term is zero at the truth, and its U-Net is what it says."""

import pytest
import torch
from deep_victims import HEAD

from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.gradient_matching._drawing import _UNet
from fedsim_attacks.gradient_matching._image_priors import ForwardPrior, KnownFeatures


def observe(norm="batch"):
    parameters = {"width": 8, "norm": norm, "head": HEAD}
    return make_observation(*example_batch(3), model="convnet", model_parameters=parameters)


@pytest.mark.parametrize("measure", ["squared_cosine", "relative"])
def test_the_features_term_is_zero_at_the_truth(measure):
    observation, truth = observe()
    prior = ForwardPrior(observation, Knowledge(), KnownFeatures(truth.features, measure))
    assert float(prior(normalize(truth.images, observation.model))[0]) < 1e-6
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > 1e-4
    value, slope = ForwardPrior(observation, Knowledge(), None)(truth.images)
    assert float(value) == 0
    assert not slope.any()


def test_equation_2_does_not_see_signs_or_norms():
    found, known = torch.randn(2, 4, 6).unbind()
    cosine = KnownFeatures(known, "squared_cosine").misfit(found)
    assert torch.isclose(KnownFeatures(-3 * known, "squared_cosine").misfit(found), cosine)
    relative = KnownFeatures(known, "relative").misfit(found)
    assert not torch.isclose(KnownFeatures(-3 * known, "relative").misfit(found), relative)


@pytest.mark.parametrize("bn", ["exact", "inferred"])
def test_the_batch_norm_term_is_least_at_the_truth(bn):
    """Zero for exact statistics; inferred variances are unbiased, which adds a little."""
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least(bn=bn))
    prior = ForwardPrior(seen, knowledge, None, batch_norm=1.0)
    right = float(prior(normalize(truth.images, observation.model))[0])
    assert right < (1e-4 if bn == "exact" else 0.5)
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > right + 0.5


def test_ungranted_statistics_are_not_used():
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least())
    assert float(ForwardPrior(seen, knowledge, None, batch_norm=1.0)(truth.images)[0]) == 0


@pytest.mark.parametrize(
    ("shape", "levels", "attentions"),
    [((3, 32, 32), 4, 2), ((1, 16, 16), 3, 2), ((1, 25, 25), 1, 0)],
)
def test_the_network_halves_down_to_four_pixels(shape, levels, attentions):
    network = _UNet(2, shape, 5, 8)
    features = torch.randn(2, 5)
    drawn = network(features)
    assert drawn.shape == (2, *shape)
    assert len(network.down) == levels
    assert not torch.equal(drawn, network(-features))
    assert sum(type(m).__name__ == "_PixelAttention" for m in network.modules()) == attentions
