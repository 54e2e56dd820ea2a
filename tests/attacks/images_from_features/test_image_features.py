"""Features from images where the head is blurred: what is trusted, refitted, and left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch, near
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.images_from_features import factored_inversion
from fedsim_attacks.images_from_features._body_gradient import BodyGradient, WholeGradient
from fedsim_attacks.images_from_features._heads import (
    are_determined,
    are_explained,
    refit_features,
    relative_noise_variance,
)
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion

HEAD = {"width": 1600, "planted": 1024, "planted_std": 0.1, "planted_gain": 0.1}
NOISE = [{"name": "gaussian_noise", "std": 1e-3}]
PRUNED = [{"name": "gradient_pruning", "ratio": 0.8}]
ROUNDED = [{"name": "quantization", "bits": 8, "rounding": "stochastic"}]
MUCH = [{"name": "gaussian_noise", "std": 0.05}]
COARSE = [{"name": "quantization", "bits": 3, "rounding": "stochastic"}]
CONVNET: dict[str, Any] = {
    "model": "convnet",
    "model_parameters": {
        "width": 8,
        "head": {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1},
    },
}


def see(defense: list[dict[str, Any]]) -> tuple[HeadGradient, Tensor]:
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
    assert truth.features is not None
    return HeadGradient.read(observation), truth.features


def error(found: Tensor, features: Tensor) -> float:
    return float(((found - features).norm(dim=1) / features.norm(dim=1)).max())


@pytest.mark.parametrize(
    ("defense", "least"), [(NOISE, 0.01), (PRUNED, 0.01), (ROUNDED, 0.05)], ids=str
)
def test_from_images_features_the_fit_goes_to_the_truth(
    defense: list[dict[str, Any]], least: float
) -> None:
    seen, features = see(defense)
    start = near(features, 0.1)
    found = refit_features(seen, start, 10 * start)
    assert found is not None
    assert error(found, features) < least < 0.1


def test_what_explains_more_is_taken_in_the_images_order() -> None:
    seen, features = see(PRUNED)
    order = torch.tensor([3, 0, 2, 1])
    found = refit_features(seen, near(features, 0.6), features[order])
    assert found is not None
    torch.testing.assert_close(found, features)


@pytest.mark.parametrize(
    ("defense", "sharp"),
    [([], True), (PRUNED, True), (NOISE, True), (MUCH, False), (COARSE, False)],
    ids=str,
)
def test_features_are_settled_where_others_like_them_explain_less(
    defense: list[dict[str, Any]], sharp: bool
) -> None:
    seen, features = see(defense)
    assert are_determined(seen, features) == are_determined(seen, near(features, 0.01)) == sharp
    # Of an exact gradient they are peeled, which needs no such check.
    assert are_determined(seen, near(features, 0.1)) == (defense == [])
    mixed = features.clone()
    mixed[:2] += 0.2 * torch.stack([features[1] - features[0], features[0] - features[1]])
    assert are_determined(seen, mixed) == (defense == [])


@pytest.mark.parametrize(("std", "sharp"), [(1e-3, True), (1.0, False)])
def test_of_one_image_the_length_may_be_in_doubt(std: float, sharp: bool) -> None:
    observation, truth = make_observation(
        torch.rand(1, 1, 6, 6, generator=rng.generator(0, "one")),
        torch.tensor([3]),
        model="mlp",
        model_parameters={"hidden": [], "head": HEAD},
        defense=[{"name": "gaussian_noise", "std": std}],
    )
    assert truth.features is not None
    assert are_determined(HeadGradient.read(observation), truth.features) == sharp


@pytest.mark.parametrize("defense", [NOISE, ROUNDED], ids=str)
def test_noise_does_not_explain_wrong_features(defense: list[dict[str, Any]]) -> None:
    seen, features = see(defense)
    assert are_explained(seen, features)
    assert not are_explained(seen, near(features, 0.3))


def observe(defense: list[dict[str, Any]]) -> tuple[Observation, GroundTruth]:
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=3, lr=0.001)
    return make_observation(*example_batch(3), **CONVNET, defense=defense, training=training)


def body_energy(observation: Observation) -> float:
    body = [value for name, value in observation.update.items() if name.startswith("body.")]
    return float(sum(value.double().square().sum() for value in body))


def test_the_share_of_noise_is_its_variance_over_the_bodys_energy() -> None:
    for std in (1e-3, 1e-2):
        observation, _ = observe([{"name": "gaussian_noise", "std": std}])
        share = relative_noise_variance(observation, HeadGradient.read(observation))
        assert share == pytest.approx(std**2 / body_energy(observation), rel=0.05)
    for defense in ([], PRUNED, [{"name": "clip", "norm": 1e-3}]):
        observation, _ = observe(defense)
        assert relative_noise_variance(observation, HeadGradient.read(observation)) == 0


@pytest.mark.parametrize(
    "defense",
    [
        {"name": "dp_sgd", "norm": 10.0, "noise_multiplier": 0.01},
        {"name": "correlated_noise", "norm": 10.0, "noise_multiplier": 0.01, "correlation": 0.5},
    ],
    ids=lambda defense: defense["name"],
)
def test_noise_of_any_defense_is_known_as_noise(defense: dict[str, Any]) -> None:
    """Taken for exact, its gradient would be peeled, and an attack fail that should not."""
    observation, _ = observe([defense])
    seen = HeadGradient.read(observation)
    assert seen.noisy
    assert not seen.exact
    # Of the first round, z_0 alone: C z / B, in units of the head's own divisor.
    assert seen.noise == pytest.approx((10.0 * 0.01 / 3) ** 2, rel=0.05)


@pytest.mark.parametrize("defense", [[], [{"name": "clip", "norm": 1e-3}]], ids=str)
def test_the_whole_gradient_is_zero_at_the_truth(defense: list[dict[str, Any]]) -> None:
    observation, truth = observe(defense)
    objective = WholeGradient(observation, truth.labels, width=1.0, calls=1)
    at = objective(normalize(truth.images, observation.model))
    assert float(at.update) < 1e-6
    assert float(at.features) == 0
    assert float(objective(normalize(1 - truth.images, observation.model)).update) > 1e-2


@pytest.mark.parametrize("goes", [1, 2])
@pytest.mark.parametrize("defense", [pytest.param(NOISE, marks=pytest.mark.slow), ROUNDED], ids=str)
def test_images_come_first_where_the_head_is_blurred(
    defense: list[dict[str, Any]], goes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And go on alone for as long again while the features that they lead to explain too little."""
    observation, truth = observe(defense)
    monkeypatch.setattr(factored_inversion, "are_determined", lambda *_: False)
    monkeypatch.setattr(factored_inversion, "are_explained", lambda *_: goes == 1)
    attack = FactoredInversion(iterations=40)
    state = attack.init(observation, Knowledge(), rng.generator(0, "phases"))
    assert state.phase.features is None
    kinds = []
    while not attack.terminate(state):
        state = attack.step(state)
        kinds.append(type(state.phase.misfit))
    assert kinds == [WholeGradient] * 10 * goes + [BodyGradient] * (40 - 10 * goes)
    assert state.phase.iterations == 40 - 10 * goes
    result = attack.postprocess(state)
    assert result.features is not None
    assert result.labels is not None
    assert sorted(result.labels.tolist()) == sorted(truth.labels.tolist())
