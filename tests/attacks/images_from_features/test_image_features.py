"""Features from images where the head is blurred: what is trusted, refitted, and left alone."""

import pytest
import torch
from deep_victims import HEAD as SMALL_HEAD
from deep_victims import descend

from fedsim import rng
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch, near
from fedsim.types import LocalTraining
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.images_from_features import factored_inversion
from fedsim_attacks.images_from_features._body_gradient import PartGradient, WholeGradient
from fedsim_attacks.images_from_features._heads import are_determined, are_explained, refit_features
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion

HEAD = {"width": 1600, "planted": 1024, "planted_std": 0.1, "planted_gain": 0.1}
NOISE = [{"name": "gaussian_noise", "std": 1e-3}]
PRUNED = [{"name": "gradient_pruning", "ratio": 0.8}]
ROUNDED = [{"name": "quantization", "bits": 8, "rounding": "stochastic"}]
MUCH = [{"name": "gaussian_noise", "std": 0.05}]
COARSE = [{"name": "quantization", "bits": 3, "rounding": "stochastic"}]


def see(defense):
    """Two images of each label, alike as those of a barely trained model, and their features."""
    stream = rng.generator(0, "joint example")
    images = (0.5 + 0.5 * torch.rand(1, 1, 6, 6, generator=stream)).repeat(4, 1, 1, 1)
    images = (images + 0.2 * torch.randn(4, 1, 6, 6, generator=stream)).clamp(0, 1)
    observation, truth = make_observation(
        images,
        torch.tensor([2, 2, 4, 4]),
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
        defense=defense,
    )
    return HeadGradient.read(observation), truth.features


def error(found, features):
    return float(((found - features).norm(dim=1) / features.norm(dim=1)).max())


@pytest.mark.parametrize(
    ("defense", "least"), [(NOISE, 0.01), (PRUNED, 0.01), (ROUNDED, 0.05)], ids=str
)
def test_from_images_features_the_fit_goes_to_the_truth(defense, least):
    seen, features = see(defense)
    start = near(features, 0.1)
    found = refit_features(seen, start, 10 * start)
    assert error(found, features) < least < 0.1


def test_what_explains_more_is_taken_in_the_images_order():
    seen, features = see(PRUNED)
    order = torch.tensor([3, 0, 2, 1])
    found = refit_features(seen, near(features, 0.6), features[order])
    torch.testing.assert_close(found, features)


@pytest.mark.parametrize(
    ("defense", "sharp"),
    [([], True), (PRUNED, True), (NOISE, True), (MUCH, False), (COARSE, False)],
    ids=str,
)
def test_features_are_settled_where_others_like_them_explain_less(defense, sharp):
    seen, features = see(defense)
    assert are_determined(seen, features) == are_determined(seen, near(features, 0.01)) == sharp
    # Of an exact gradient they are peeled, which needs no such check.
    assert are_determined(seen, near(features, 0.1)) == (defense == [])
    mixed = features.clone()
    mixed[:2] += 0.2 * torch.stack([features[1] - features[0], features[0] - features[1]])
    assert are_determined(seen, mixed) == (defense == [])


@pytest.mark.parametrize(("std", "sharp"), [(1e-3, True), (1.0, False)])
def test_of_one_image_the_length_may_be_in_doubt(std, sharp):
    observation, truth = make_observation(
        torch.rand(1, 1, 6, 6, generator=rng.generator(0, "one")),
        torch.tensor([3]),
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
        defense=[{"name": "gaussian_noise", "std": std}],
    )
    assert are_determined(HeadGradient.read(observation), truth.features) == sharp


@pytest.mark.parametrize("defense", [NOISE, ROUNDED], ids=str)
def test_noise_does_not_explain_wrong_features(defense):
    seen, features = see(defense)
    assert are_explained(seen, features)
    assert not are_explained(seen, near(features, 0.3))


def observe(defense):
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=3, lr=0.001)
    model = {"model": "convnet", "model_parameters": {"width": 8, "head": SMALL_HEAD}}
    return make_observation(*example_batch(3), **model, defense=defense, training=training)


@pytest.mark.parametrize(
    "defense",
    [
        {"name": "dp_sgd", "norm": 10.0, "noise_multiplier": 0.01},
        {"name": "correlated_noise", "norm": 10.0, "noise_multiplier": 0.01, "correlation": 0.5},
    ],
    ids=lambda defense: defense["name"],
)
def test_noise_of_any_defense_is_known_as_noise(defense):
    """Taken for exact, its gradient would be peeled, and an attack fail that should not."""
    observation, _ = observe([defense])
    seen = HeadGradient.read(observation)
    assert seen.noisy
    assert not seen.exact
    # Of the first round, z_0 alone: C z / B, in units of the head's own divisor.
    assert seen.noise == pytest.approx((10.0 * 0.01 / 3) ** 2, rel=0.05)


@pytest.mark.parametrize("goes", [1, 2])
def test_images_come_first_where_the_head_is_blurred(goes, monkeypatch):
    """And go on alone for as long again while the features that they lead to explain too little."""
    observation, truth = observe(ROUNDED)
    monkeypatch.setattr(factored_inversion, "are_determined", lambda *_: False)
    monkeypatch.setattr(factored_inversion, "are_explained", lambda *_: goes == 1)
    attack = FactoredInversion(iterations=40)
    state, kinds = descend(attack, observation)
    assert kinds == [WholeGradient] * 10 * goes + [PartGradient] * (40 - 10 * goes)
    assert state.phase.iterations == 40 - 10 * goes
    result = attack.postprocess(state)
    assert sorted(result.labels.tolist()) == sorted(truth.labels.tolist())
