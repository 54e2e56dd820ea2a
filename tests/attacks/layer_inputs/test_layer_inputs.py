"""Inputs of layers: exact where the gradient tells them, and called determined only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.scoring import false_certificates, score
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation, Reconstruction
from fedsim_attacks.layer_inputs._cone import find_rays
from fedsim_attacks.layer_inputs._layers import trace_layers
from fedsim_attacks.layer_inputs.cocktail_party import CocktailParty
from fedsim_attacks.layer_inputs.extreme_rays import ExtremeRays
from fedsim_attacks.layer_inputs.spear import Spear

MLP: dict[str, Any] = {"model": "mlp", "model_parameters": {"hidden": [64, 32]}}
SHALLOW: dict[str, Any] = {"model": "mlp", "model_parameters": {"hidden": [64]}}
RESNET: dict[str, Any] = {
    "model": "resnet18",
    "model_parameters": {"stem": "imagenet", "norm": "group", "width": 16},
}
CLIP = [{"name": "clip", "norm": 1e-3}]
EXACT = [
    pytest.param(ExtremeRays(), MLP, id="extreme_rays"),
    pytest.param(Spear(), SHALLOW, id="spear"),
    pytest.param(Spear(search="descent"), SHALLOW, id="spear_by_descent"),
]
MANY = {"count": 32, "size": 12, "seed": 3, "model_parameters": {}}
"""More images than plain programs find: each one found makes the others easier."""


def observe(
    count: int, seed: int = 0, size: int = 8, **case: Any
) -> tuple[Observation, GroundTruth]:
    stream = rng.generator(seed, "layer inputs")
    images = torch.rand(count, 1, size, size, generator=stream)
    labels = torch.randint(10, (count,), generator=stream)
    return make_observation(images, labels, seed=seed, **{**MLP, **case})


def disturb(observation: Observation, share: float, stream: torch.Generator) -> Observation:
    """Adds noise that nobody declares."""
    noisy = {
        name: tensor + share * tensor.std() * torch.randn(tensor.shape, generator=stream)
        for name, tensor in observation.update.items()
    }
    return replace(observation, update=noisy)


def attacked(attack: Attack[Any], observation: Observation) -> Reconstruction:
    return solve(attack, observation, Knowledge(), seed=1).reconstruction


def order(found: Tensor | None, true: Tensor | None) -> Tensor:
    """Returns which of `found` each of `true` is."""
    costs = torch.cdist(true.flatten(1), found.flatten(1))
    return torch.from_numpy(linear_sum_assignment(costs.numpy())[1])


@pytest.mark.parametrize(("attack", "case"), [*EXACT, pytest.param(ExtremeRays(), MANY, id="many")])
@pytest.mark.parametrize("defense", [[], CLIP], ids=["none", "clip"])
def test_a_batch_of_a_fully_connected_network_is_exact(
    attack: Attack[Any], case: dict[str, Any], defense: list[dict[str, Any]]
) -> None:
    """A clipped update is one with a factor that only its client knows."""
    observation, truth = observe(**{"count": 6, **case}, defense=defense)
    found = attacked(attack, observation)
    whose = order(found.images, truth.images)
    torch.testing.assert_close(found.images[whose], truth.images, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.features[whose], truth.features, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.labels[whose], truth.labels)
    assert bool(found.determined.all())


@pytest.mark.parametrize("classes", [2, 10])
def test_more_images_than_classes_of_a_residual_network(classes: int) -> None:
    """The last stage's first convolution meets maps of 2x2 pixels, and makes one of them."""
    images = torch.rand(11, 3, 32, 32, generator=rng.generator(2, "images"))
    labels = torch.arange(11) % classes
    observation, truth = make_observation(images, labels, num_classes=classes, **RESNET)
    found = attacked(ExtremeRays(), observation)
    assert found.images is None and found.features is not None and found.labels is not None
    whose = order(found.features, truth.features)
    torch.testing.assert_close(found.features[whose], truth.features, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.labels[whose], truth.labels)
    assert bool(found.determined.all())


@pytest.mark.parametrize(("attack", "case"), EXACT)
def test_noise_leaves_nothing_called_determined_that_is_wrong(
    attack: Attack[Any], case: dict[str, Any]
) -> None:
    if isinstance(attack, Spear):
        attack = attack.model_copy(update={"iterations": 2})
    for std in (1e-6, 1e-4, 1e-2):
        observation, truth = observe(5, **case, defense=[{"name": "gaussian_noise", "std": std}])
        try:
            found = attacked(attack, observation)
        except AttackFailed:
            continue
        whose = order(found.features, truth.features)
        wrong = (found.features[whose] - truth.features).norm(dim=1)
        wrong = wrong > 0.05 * truth.features.norm(dim=1)
        assert not bool((wrong & found.determined[whose]).any())


@pytest.mark.parametrize("attack", [ExtremeRays(), Spear(), CocktailParty(iterations=3)])
@pytest.mark.parametrize(
    ("count", "case", "kept", "reason"),
    [
        (4, {"defense": [{"name": "gradient_pruning", "ratio": 0.9}]}, 1, "sets entries to zero"),
        (4, {"defense": [{"name": "dropout", "rate": 0.5}]}, 1, "dropout"),
        (9, {"model_parameters": {"hidden": [8]}}, 1, "8 inputs at most, and the update is of 9"),
        (2, {"model": "convnet", "model_parameters": {}, "size": 18}, 1, "has no linear layer"),
        (3, {}, 0, "row space"),
    ],
    ids=["pruning", "dropout", "few neurons", "convolutions", "nothing left"],
)
def test_what_shows_no_inputs_is_refused(
    attack: Attack[Any], count: int, case: dict[str, Any], kept: int, reason: str
) -> None:
    observation, _ = observe(count, **case)
    update = {n: t if n.startswith("head") else kept * t for n, t in observation.update.items()}
    with pytest.raises(AttackFailed, match=reason):
        attacked(attack, replace(observation, update=update))


def test_layers_of_a_residual_network_say_what_follows_from_their_inputs() -> None:
    """Only a whole block's input, which no addition bypasses, gives all features."""
    images = torch.rand(2, 3, 32, 32)
    observation, _ = make_observation(images, torch.tensor([1, 2]), **RESNET)
    layers = {layer.name.removeprefix("body."): layer for layer in trace_layers(observation)}
    assert set(layers) == {f"layer4.{block}.conv{conv}" for block in (0, 1) for conv in (1, 2)}
    assert [name for name, layer in layers.items() if layer.features is not None] == [
        "layer4.0.conv1",
        "layer4.1.conv1",
    ]
    assert [name for name, layer in layers.items() if layer.scale_free] == ["layer4.0.conv1"]
    assert layers["layer4.0.conv1"].gradient.shape == (128, 64 * 4)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_batch_norm_in_training_mode_is_refused(noise: float) -> None:
    """Of two images, noise leaves one input, and batch norm makes no features of a single one."""
    norm = {**RESNET["model_parameters"], "norm": "batch"}
    stream = rng.generator(5, "batch norm")
    images, labels = torch.rand(2, 3, 32, 32, generator=stream), torch.tensor([0, 1])
    observation, _ = make_observation(
        images, labels, num_classes=2, model="resnet18", model_parameters=norm
    )
    observation = disturb(observation, noise, stream)
    assert not any(layer.scale_free for layer in trace_layers(observation))
    with pytest.raises(AttackFailed, match="batch norm in training mode"):
        attacked(ExtremeRays(), observation)


def test_an_extreme_ray_that_is_no_input_is_not_returned() -> None:
    """Inputs without zeros of their own are no extreme rays: nothing is found in their place."""
    stream = rng.generator(0, "rays")
    sparse = torch.rand(5, 60, generator=stream, dtype=torch.float64)
    sparse *= torch.rand(5, 60, generator=stream) > 0.5
    mixing = torch.randn(5, 5, generator=stream, dtype=torch.float64)
    _, lengths, rows = torch.linalg.svd(mixing @ sparse, full_matrices=False)
    rows = lengths[:, None] * rows
    values = F.normalize(find_rays(rows, rows, 1e-13, stream).combinations @ rows)
    true = F.normalize(sparse)
    torch.testing.assert_close(values[order(values, true)], true, atol=1e-8, rtol=0)
    _, lengths, rows = torch.linalg.svd(mixing @ (sparse + 0.1), full_matrices=False)
    rows = lengths[:, None] * rows
    assert len(find_rays(rows, rows, 1e-13, stream).combinations) == 0


@pytest.mark.parametrize(("attack", "case"), [EXACT[0], EXACT[2]])
def test_a_batch_with_an_input_missing_has_no_labels(
    attack: Attack[Any], case: dict[str, Any]
) -> None:
    """They would be read off a mean in its place; an image twice in a batch is found once."""
    images = torch.rand(3, 1, 8, 8, generator=rng.generator(0, "twice"))[[0, 1, 1]]
    observation, truth = make_observation(images, torch.tensor([3, 5, 5]), **case)
    found = attacked(attack, observation)
    assert found.features is not None and len(found.features) == 3
    assert found.labels is None
    values = score(found, truth)
    assert values["label_accuracy"] is None and values["feature_cosine"] is not None


@pytest.mark.parametrize("case", [{}, {"defense": CLIP}, RESNET])
def test_exact_inputs_are_certified(case: dict[str, Any]) -> None:
    images = torch.rand(4, 3, 32, 32, generator=rng.generator(3, "certified"))
    observation, truth = make_observation(
        images, torch.tensor([0, 1, 1, 0]), num_classes=2, **{**MLP, **case}
    )
    found = attacked(ExtremeRays(), observation)
    assert found.certified is not None and found.certified.tolist() == [True] * 4
    assert false_certificates(found, truth) == 0
    assert false_certificates(replace(found, labels=1 - found.labels), truth) == 4


@pytest.mark.parametrize("change", ["declared", "undeclared", "fewer", "twice"])
def test_nothing_is_certified_of_what_is_not_the_clients_own_gradient(change: str) -> None:
    images = torch.rand(4, 1, 8, 8, generator=rng.generator(3, "certified"))
    if change == "twice":
        images = images[[0, 1, 2, 2]]
    noise = [{"name": "gaussian_noise", "std": 1e-9}] if change == "declared" else []
    labels = torch.tensor([0, 1, 1, 1])
    observation, _ = make_observation(images, labels, num_classes=2, defense=noise, **MLP)
    if change == "undeclared":
        observation = disturb(observation, 1e-5, rng.generator(4, "noise"))
    if change == "fewer":
        observation = replace(observation, training=replace(observation.training, batch_size=3))
    found = attacked(ExtremeRays(), observation)
    assert not bool(found.certified.any())


def test_inputs_that_drift_over_local_steps_are_not_called_determined() -> None:
    training = LocalTraining(algorithm="fedavg", steps=3, batch_size=6, lr=0.03, batches="same")
    observation, truth = observe(6, seed=2, training=training)
    found = attacked(ExtremeRays(), observation)
    errors = torch.cdist(found.features, truth.features) / found.features.norm(dim=1)[:, None]
    assert not bool((found.determined & (errors.amin(1) > 0.03)).any())


def test_features_over_local_steps_are_those_of_the_images() -> None:
    training = LocalTraining(algorithm="fedavg", steps=3, batch_size=6, lr=0.003, batches="same")
    observation, truth = observe(6, training=training)
    found = attacked(ExtremeRays(), observation)
    whose = order(found.images, truth.images)
    torch.testing.assert_close(found.features[whose], truth.features, atol=1e-4, rtol=1e-3)
    assert bool(found.determined.all())
    assert not bool(found.certified.any())


def test_independent_components_of_the_first_layer_are_near_the_images() -> None:
    """Sparse images are far from Gaussian; the paper's objective has no exact answer."""
    stream = rng.generator(1, "party")
    images = torch.rand(3, 1, 16, 16, generator=stream)
    images = images * (torch.rand(3, 1, 16, 16, generator=stream) > 0.85)
    observation, truth = make_observation(images, torch.tensor([1, 4, 7]), **MLP)
    attack = CocktailParty(iterations=800, total_variation=0.0)
    found = attacked(attack, observation)
    assert found.images is not None and found.determined is None
    errors = (found.images[order(found.images, images)] - truth.images).square().mean()
    assert float(errors) < 0.1 * float(images.var())


def test_the_cocktail_party_attack_inverts_the_embeddings_that_it_unmixes() -> None:
    """Its second half: pixels descend to where their embeddings are the unmixed ones."""
    images = torch.rand(2, 3, 32, 32, generator=rng.generator(0, "embeddings"))
    observation, _ = make_observation(images, torch.tensor([1, 2]), **RESNET)

    def missed(**steps: int) -> tuple[float, Tensor]:
        found = attacked(CocktailParty(iterations=20, **steps), observation)
        assert bool((found.images >= 0).all()) and bool((found.images <= 1).all())
        assert found.iterations == 20 + steps["image_iterations"]
        with torch.no_grad():
            embedded = rebuild(observation).features(normalize(found.images, observation.model))
        return float(
            1 - F.cosine_similarity(embedded, found.features).square().mean()
        ), found.features

    assert attacked(CocktailParty(iterations=20), observation).images is None
    (first, start), (last, end) = missed(image_iterations=1), missed(image_iterations=40)
    assert torch.equal(start, end) and last < 0.5 * first


@pytest.mark.parametrize(
    ("attack", "off"),
    [(ExtremeRays(), 0), (Spear(iterations=2), 32), (Spear(iterations=2, search="descent"), 32)],
    ids=["extreme_rays", "spear", "spear_by_descent"],
)
def test_a_mixture_of_images_that_activate_the_same_neurons_is_not_determined(
    attack: Attack[Any], off: int
) -> None:
    """Of two classes their error signals have one direction, and the gradient shows their sum."""
    images = torch.rand(2, 1, 8, 8, generator=rng.generator(0, "mixture"))
    labels = torch.zeros(2, dtype=torch.int64)
    before, _ = make_observation(images, labels, num_classes=2, **SHALLOW)
    biases = torch.full((64,), 20.0)
    biases[:off] = -20.0
    weights = {**before.parameters, "body.1.bias": biases}
    observation, truth = make_observation(images, labels, num_classes=2, **SHALLOW, weights=weights)
    found = attacked(attack, observation)
    assert float((found.images[:1] - truth.images).abs().amax((1, 2, 3)).min()) > 0.1
    assert not bool(found.determined.any())
