"""Inverting gradients: better than the mean image, and its total variation."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
from slow_cases import slow_but

from fedsim.attacking.knowledge import hand_over
from fedsim.attacking.question import Public
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Faces
from fedsim.models.base import denormalize, normalize
from fedsim.testing import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.gradient_matching._matching import Candidate, cosine_distance
from fedsim_attacks.gradient_matching.generative_prior import GenerativePrior
from fedsim_attacks.gradient_matching.grad_inversion import GradInversion
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients, regularized

ATTACKS = {
    "InvertingGradients": InvertingGradients(iterations=200),
    "GradInversion": GradInversion(iterations=200, seeds=2, warmup=10),
    "GenerativePrior": GenerativePrior(iterations=150),
    "a trained GenerativePrior": GenerativePrior(training_iterations=150, iterations=150),
}


@pytest.mark.parametrize("attack", slow_but(["InvertingGradients"], ATTACKS))
def test_on_an_mlp_it_beats_the_mean_image_clearly(attack):
    faces = Faces(size=16).load()
    pixels, public = faces.train_images.float() / 255, Public(images=faces.test_images)
    gains = []
    for index in (5, 40, 120):
        images, truth = pixels[index : index + 1], faces.train_labels[index : index + 1]
        observed = make_observation(images, truth, model="mlp")
        seen = hand_over(*observed, Grant(labels="inferred", public="test"), public)
        found = solve(attack, *seen, seed=0).reconstruction
        assert torch.equal(found.labels, truth)
        guess = (pixels.mean(0) - images).square().mean()
        gains.append(10 * math.log10(guess / (found.images - images).square().mean()))
    assert median(gains) > 5
    assert min(gains) > 2


def test_the_likelihood_at_the_truth_is_that_of_the_declared_noise():
    """Each entry's squared noise over its variance is 1 in the mean, whatever the local steps."""
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    defense = [{"name": "gaussian_noise", "std": 0.02}]
    gradient = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)
    steps = replace(gradient, algorithm="fedavg", steps=2, batch_size=2)
    for training in (gradient, steps):
        observation, truth = make_observation(
            images, torch.arange(4), model="mlp", training=training, defense=defense
        )
        known = hand_over(observation, truth, Grant(labels="known"))
        attack = InvertingGradients(distance="likelihood", total_variation=0, iterations=1)
        state = attack.init(*known, torch.Generator())
        state.candidate.images.data.copy_(normalize(images, observation.model))
        entries = sum(each.numel() for each in observation.update.values())
        expected = entries / (2 * images.numel())
        assert float(attack.step(state).loss) == pytest.approx(expected, rel=0.1)


def test_without_announced_noise_there_is_no_likelihood():
    attack = InvertingGradients(distance="likelihood")
    with pytest.raises(AttackFailed, match="no noise of known variance is announced"):
        attack.init(*colored(), torch.Generator())


def test_iterates_stay_valid_pixels():
    observation, _ = make_observation(torch.zeros(1, 1, 8, 8), torch.tensor([3]), model="mlp")
    attack = InvertingGradients(iterations=10, step_size=1.0)
    state = attack.init(observation, Knowledge(), torch.Generator())
    for _ in range(5):
        state = attack.step(state)
    pixels = denormalize(state.candidate.images.detach(), observation.model)
    assert -1e-6 < float(pixels.min()) < float(pixels.max()) < 1 + 1e-6


def test_stretched_images_are_multiples_of_the_others_that_fill_the_valid_pixels():
    seen = colored(labels=(1, 2), side=8)
    plain, stretched = (
        solve(InvertingGradients(iterations=3, step_size=1e-3, stretched=on), *seen, seed=0)
        for on in (False, True)
    )
    assert plain.reconstruction.loss == stretched.reconstruction.loss
    a, b = plain.reconstruction.images, stretched.reconstruction.images
    center = denormalize(torch.zeros(1, 3, 1, 1), seen[0].model)
    for before, after in zip(a - center, b - center, strict=True):
        inside = (after.abs() < 0.45) & (before.abs() > 0.01)  # not at an end of the valid pixels
        ratio = (after / before)[inside]
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-3, atol=0)
    assert b.amax() > 0.98 or b.amin() < 0.02
    assert not torch.equal(a, b)


def colored(labels=(0, 1), side=10):
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    observation, truth = make_observation(images, torch.tensor(labels), model="mlp")
    return hand_over(observation, truth, Grant(labels="known"))


@pytest.mark.parametrize("signs", ["hard", "soft"])
def test_a_step_follows_the_signs_that_are_asked_for(signs, monkeypatch):
    seen = colored()
    attack = InvertingGradients.model_validate({"iterations": 4, "signs": signs})
    state = attack.init(*seen, torch.Generator().manual_seed(2))
    attack.step(state)
    before = state.candidate.images.detach().clone()
    candidate = Candidate(before, state.candidate.labels)
    _, (slope,) = regularized(state.matching, candidate, cosine_distance, 0.1)
    expected = slope.sign() if signs == "hard" else torch.tanh(0.75 * slope) / 0.75
    followed = []
    monkeypatch.setattr(state.optimizer, "step", lambda slopes, _: followed.extend(slopes))
    attack.step(state)
    torch.testing.assert_close(followed, [expected])


def test_a_patterned_start_repeats_its_patch():
    attack = InvertingGradients(iterations=2, pattern=4)
    images = attack.init(*colored(), torch.Generator().manual_seed(2)).candidate.images.detach()
    torch.testing.assert_close(images[:, :, 4:], images[:, :, :-4])
    torch.testing.assert_close(images[..., 4:], images[..., :-4])
    patches = images[:, :, :4, :4].flatten(1)
    assert not torch.equal(patches[0], patches[1])
    assert len(patches[0].unique()) == patches[0].numel()


def test_a_cosine_rises_first_and_falls_to_nothing():
    attack = InvertingGradients(iterations=200, decay="cosine", step_size=0.1)
    rates = [attack._rate(done) for done in range(200)]
    assert rates[0] == pytest.approx(0.1 / 50)
    assert max(rates) == rates[49]
    assert rates[100] == pytest.approx(0.05)
    assert rates[-1] < 1e-4 < rates[0]
