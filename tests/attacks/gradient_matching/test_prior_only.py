"""The control has the prior of the attack that it controls, and nothing of the update."""

import pytest
import torch

from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.testing.cases import example_batch, make_observation
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients, total_variation
from fedsim_attacks.gradient_matching.prior_only import PriorOnly
from fedsim_attacks.images_from_features.feature_inversion import FeatureInversion


def observed(seed=2):
    return make_observation(*example_batch(2, (3, 16, 16)), seed=seed)[0]


def drawn(**parameters):
    observation = observed()
    attack = PriorOnly(iterations=60, width=8, **parameters)
    return solve(attack, observation, Knowledge(), 4).reconstruction.images


@pytest.mark.parametrize("prior", ["unet", "pixel"])
def test_the_update_has_no_say(prior):
    observation, other = observed(), observed(seed=3)
    found = [
        solve(PriorOnly(iterations=3, width=8, prior=prior), seen, Knowledge(), 4).reconstruction
        for seen in (observation, other)
    ]
    assert torch.equal(found[0].images, found[1].images)


def test_by_default_it_has_the_variation_of_feature_inversion():
    names = ("prior", "width", "learning_rate", "total_variation")
    control, attack = PriorOnly().model_dump(), FeatureInversion().model_dump()
    assert {name: control[name] for name in names} == {name: attack[name] for name in names}
    assert PriorOnly().stretched == InvertingGradients().stretched is False


@pytest.mark.parametrize("prior", [pytest.param("unet", marks=pytest.mark.slow), "pixel"])
def test_variation_falls_by_its_weight(prior):
    spec = observed().model

    def variation(images):
        return float(total_variation(normalize(images, spec))[0])

    still = drawn(prior=prior, total_variation=0.0)
    assert variation(drawn(prior=prior)) < 0.8 * variation(still)


@pytest.mark.slow
def test_stretched_it_fills_the_valid_pixels():
    def width(images):
        return float((images.flatten(1).amax(1) - images.flatten(1).amin(1)).mean())

    flat, stretched = drawn(), drawn(stretched=True)
    assert width(stretched) > width(flat)
    images = stretched.flatten(1)
    left = torch.minimum(1 - images.amax(1), images.amin(1))
    assert float(left.max()) < 0.02, "of each image some pixel is black or white"
