"""What public images tell: the regression's known answers, its law's calibration, and its use."""

import pytest
import torch
from deep_victims import HEAD

from fedsim import rng
from fedsim.attacking.knowledge import hand_over
from fedsim.attacking.question import Public
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant
from fedsim.data.bundled import Digits
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion
from fedsim_attacks.images_from_features.feature_regression import (
    FeatureRegression,
    ImageDistribution,
    ImagePrior,
    _precision,
    _ridge,
)


def noise(*shape, of):
    return torch.randn(*shape, generator=rng.generator(4, of))


def test_residuals_are_as_large_as_those_of_other_images():
    """A fit of 50 numbers to 100 samples leaves half of the variance there, and doubles it here."""
    weights = noise(50, 20, of="weights") * 50**-0.5 * 3
    inputs = noise(1100, 50, of="inputs")
    targets = inputs @ weights + noise(1100, 20, of="noise")
    found, residuals = _ridge(inputs[:100], targets[:100])
    elsewhere = (targets[100:] - inputs[100:] @ found).square().mean()
    fitted = (targets[:100] - inputs[:100] @ found).square().mean()
    assert float(fitted) < 0.7 < 1.5 < float(elsewhere)
    assert float(residuals.square().mean()) == pytest.approx(float(elsewhere), rel=0.15)


def test_the_precision_is_the_inverse_covariance_and_few_samples_shrink_it():
    spread = torch.tensor([3.0, 1.0, 0.3])
    found = _precision(noise(20_000, 3, of="samples") * spread)
    torch.testing.assert_close(found, torch.diag(spread**-2), rtol=0.05, atol=0.2)
    few = _precision(noise(4, 30, of="few"))  # of rank 4: its inverse does not exist
    assert 0.3 < float(few.diagonal().mean()) < 10


@pytest.mark.parametrize("side", [8, 16, 32, 50])
def test_energy_and_slope_of_a_law(side):
    """Zero at the mean; 1 for draws, of images that are not averaged; a slope that is one."""
    small = min(16, side)
    size = 2 * small**2
    factor = noise(size, size, of="factor") * size**-0.5 + torch.eye(size)
    means = noise(3, 2, small, small, of="means")
    law = ImageDistribution(means, torch.linalg.inv(factor @ factor.T), torch.Size((side, side)))
    assert law.means.shape == (3, 2, side, side)
    if side == small:
        assert float(law(means)[0]) == pytest.approx(0, abs=1e-6)
        draws = (noise(3, size, of="draws") @ factor.T).view_as(means)
        assert float(law(means + draws)[0]) == pytest.approx(1, abs=0.2)
    images = law.means + 0.1 * noise(3, 2, side, side, of="images")
    along = noise(3, 2, side, side, of="along")
    before, after = (law(images + h * along)[0].double() for h in (-1e-2, 1e-2))
    slope = float((law(images)[1] * along).sum())
    assert slope == pytest.approx(float(after - before) / 2e-2, rel=0.02, abs=1e-3)


def digits(count, defense):
    """Of a fresh network with a two-layer head; public are the test split's."""
    data = Digits(size=16).load()
    observation, truth = make_observation(
        data.train_images[:count].float() / 255,
        data.train_labels[:count],
        model="convnet",
        model_parameters={"width": 8, "head": HEAD},
        defense=defense,
    )
    return observation, truth, data.test_images


@pytest.mark.parametrize("std", [0.0, pytest.param(0.003, marks=pytest.mark.slow)])
def test_images_are_read_off_features_behind_noise_too(std):
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    observation, truth, public = digits(4, defense)
    _, knowledge = hand_over(observation, truth, Grant.least(public="test"), Public(images=public))
    found = solve(FeatureRegression(), observation, knowledge, 0).reconstruction
    mean = (public.float() / 255).mean(0)
    guessed = -10 * torch.log10((truth.images - mean).square().flatten(1).mean(1)).mean()
    gained = score(found, truth).metrics()
    assert gained["label_accuracy"] == 1
    assert gained["psnr"] > float(guessed) + 2


def test_features_in_doubt_are_not_read():
    """Of features that are wrong a regression makes images that are worse than their mean."""
    observation, _, public = digits(4, [{"name": "gaussian_noise", "std": 0.3}])
    _, knowledge = hand_over(observation, None, Grant.least(public="test"), Public(images=public))
    images = solve(FeatureRegression(), observation, knowledge, 0).reconstruction.images
    mean = (public.float() / 255).mean(0).expand_as(images)
    torch.testing.assert_close(images, mean, rtol=0, atol=1e-4)


def test_an_attack_uses_public_images_only_if_they_are_granted_and_wanted():
    observation, truth, public = digits(2, [])
    _, without = hand_over(observation, truth, Grant.least())
    _, granted = hand_over(observation, truth, Grant.least(public="test"), Public(images=public))
    attack = FactoredInversion(iterations=10)
    plain = solve(attack, observation, without, 0).reconstruction
    unused = solve(
        attack.model_copy(update={"public": False}), observation, granted, 0
    ).reconstruction
    used = solve(attack, observation, granted, 0).reconstruction
    assert torch.equal(plain.images, unused.images)
    before, after = (score(each, truth).metrics()["psnr"] for each in (plain, used))
    assert after > before + 5, "ten iterations from the regression's images, and not from noise"


def test_public_images_of_another_shape_or_of_one_image_are_a_stated_failure():
    observation, _ = make_observation(
        *example_batch(2), model="mlp", model_parameters={"head": HEAD}
    )
    for public in (torch.zeros(9, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, 1, 16, 16)):
        with pytest.raises(AttackFailed, match="two or more"):
            ImagePrior(observation, public)
