"""Inputs of layers: exact where the gradient tells them, and called determined only there."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

from fedsim import rng
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.scoring import false_certificates
from fedsim.testing import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.layer_inputs._cone import find_rays
from fedsim_attacks.layer_inputs._layers import trace_layers
from fedsim_attacks.layer_inputs.cocktail_party import CocktailParty
from fedsim_attacks.layer_inputs.extreme_rays import ExtremeRays
from fedsim_attacks.layer_inputs.spear import Spear

MLP = {"model": "mlp", "model_parameters": {"hidden": [64, 32]}}
SHALLOW = {"model": "mlp", "model_parameters": {"hidden": [64]}}
RESNET = {
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


def observe(count, seed=0, size=8, **case):
    stream = rng.generator(seed, "layer inputs")
    images = torch.rand(count, 1, size, size, generator=stream)
    labels = torch.randint(10, (count,), generator=stream)
    return make_observation(images, labels, seed=seed, **{**MLP, **case})


def disturb(observation, share, stream):
    """Adds noise that nobody declares."""
    noisy = {
        name: tensor + share * tensor.std() * torch.randn(tensor.shape, generator=stream)
        for name, tensor in observation.update.items()
    }
    return replace(observation, update=noisy)


def order(found, true):
    """Returns which of `found` each of `true` is."""
    costs = torch.cdist(true.flatten(1), found.flatten(1))
    return torch.from_numpy(linear_sum_assignment(costs.numpy())[1])


def attacked(attack, case):
    """The answer, in the order of the truth."""
    observation, truth = case
    found = solve(attack, observation, Knowledge(), seed=1).reconstruction
    whose = order(found.features, truth.features)
    parts = ("images", "features", "labels", "determined", "certified")
    known = {name: getattr(found, name) for name in parts}
    return replace(found, **{n: part[whose] for n, part in known.items() if part is not None})


@pytest.mark.parametrize(("attack", "case"), [*EXACT, pytest.param(ExtremeRays(), MANY, id="many")])
@pytest.mark.parametrize("defense", [[], CLIP], ids=["none", "clip"])
def test_a_batch_of_a_fully_connected_network_is_exact(attack, case, defense):
    """A clipped update is one with a factor that only its client knows."""
    observation, truth = observe(**{"count": 6, **case}, defense=defense)
    found = attacked(attack, (observation, truth))
    torch.testing.assert_close(found.images, truth.images, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.features, truth.features, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.labels, truth.labels)
    assert bool(found.determined.all())


@pytest.mark.parametrize("classes", [2, 10])
def test_more_images_than_classes_of_a_residual_network(classes):
    """The last stage's first convolution meets maps of 2x2 pixels, and makes one of them."""
    images = torch.rand(11, 3, 32, 32, generator=rng.generator(2, "images"))
    labels = torch.arange(11) % classes
    observation, truth = make_observation(images, labels, num_classes=classes, **RESNET)
    found = attacked(ExtremeRays(), (observation, truth))
    assert found.images is None
    torch.testing.assert_close(found.features, truth.features, atol=1e-3, rtol=1e-3)
    assert torch.equal(found.labels, truth.labels)
    assert bool(found.determined.all())


@pytest.mark.parametrize(("attack", "case"), EXACT)
def test_noise_leaves_nothing_called_determined_that_is_wrong(attack, case):
    if isinstance(attack, Spear):
        attack = attack.model_copy(update={"iterations": 2})
    for std in (1e-6, 1e-4, 1e-2):
        observation, truth = observe(5, **case, defense=[{"name": "gaussian_noise", "std": std}])
        try:
            found = attacked(attack, (observation, truth))
        except AttackFailed:
            continue
        errors = (found.features - truth.features).norm(dim=1) / truth.features.norm(dim=1)
        assert not bool(((errors > 0.05) & found.determined).any())


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
def test_what_shows_no_inputs_is_refused(attack, count, case, kept, reason):
    observation, truth = observe(count, **case)
    update = {n: t if n.startswith("head") else kept * t for n, t in observation.update.items()}
    with pytest.raises(AttackFailed, match=reason):
        attacked(attack, (replace(observation, update=update), truth))


def test_layers_of_a_residual_network_say_what_follows_from_their_inputs():
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
def test_batch_norm_in_training_mode_is_refused(noise):
    """Of two images, noise leaves one input, and batch norm makes no features of a single one."""
    norm = {**RESNET["model_parameters"], "norm": "batch"}
    stream = rng.generator(5, "batch norm")
    images, labels = torch.rand(2, 3, 32, 32, generator=stream), torch.tensor([0, 1])
    observation, truth = make_observation(
        images, labels, num_classes=2, model="resnet18", model_parameters=norm
    )
    observation = disturb(observation, noise, stream)
    assert not any(layer.scale_free for layer in trace_layers(observation))
    with pytest.raises(AttackFailed, match="batch norm in training mode"):
        attacked(ExtremeRays(), (observation, truth))


def test_an_extreme_ray_that_is_no_input_is_not_returned():
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
def test_a_batch_with_an_input_missing_has_no_labels(attack, case):
    """They would be read off a mean in its place; an image twice in a batch is found once."""
    images = torch.rand(3, 1, 8, 8, generator=rng.generator(0, "twice"))[[0, 1, 1]]
    observation, truth = make_observation(images, torch.tensor([3, 5, 5]), **case)
    found = attacked(attack, (observation, truth))
    assert len(found.features) == 3
    assert found.labels is None


@pytest.mark.parametrize("case", [{}, {"defense": CLIP}, RESNET])
def test_exact_inputs_are_certified(case):
    images = torch.rand(4, 3, 32, 32, generator=rng.generator(3, "certified"))
    observation, truth = make_observation(
        images, torch.tensor([0, 1, 1, 0]), num_classes=2, **{**MLP, **case}
    )
    found = attacked(ExtremeRays(), (observation, truth))
    assert found.certified.tolist() == [True] * 4
    assert false_certificates(found, truth) == 0
    assert false_certificates(replace(found, labels=1 - found.labels), truth) == 4


@pytest.mark.parametrize("change", ["declared", "undeclared", "fewer", "twice"])
def test_nothing_is_certified_of_what_is_not_the_clients_own_gradient(change):
    images = torch.rand(4, 1, 8, 8, generator=rng.generator(3, "certified"))
    if change == "twice":
        images = images[[0, 1, 2, 2]]
    noise = [{"name": "gaussian_noise", "std": 1e-9}] if change == "declared" else []
    labels = torch.tensor([0, 1, 1, 1])
    observation, truth = make_observation(images, labels, num_classes=2, defense=noise, **MLP)
    if change == "undeclared":
        observation = disturb(observation, 1e-5, rng.generator(4, "noise"))
    if change == "fewer":
        observation = replace(observation, training=replace(observation.training, batch_size=3))
    assert not bool(attacked(ExtremeRays(), (observation, truth)).certified.any())


STEPS = LocalTraining(algorithm="fedavg", steps=3, batch_size=6, lr=0.003, batches="same")


def test_inputs_that_drift_over_local_steps_are_not_called_determined():
    observation, truth = observe(6, seed=2, training=replace(STEPS, lr=0.03))
    found = attacked(ExtremeRays(), (observation, truth))
    errors = torch.cdist(found.features, truth.features) / found.features.norm(dim=1)[:, None]
    assert not bool((found.determined & (errors.amin(1) > 0.03)).any())


def test_features_over_local_steps_are_those_of_the_images():
    observation, truth = observe(6, training=STEPS)
    found = attacked(ExtremeRays(), (observation, truth))
    torch.testing.assert_close(found.features, truth.features, atol=1e-4, rtol=1e-3)
    assert bool(found.determined.all())
    assert not bool(found.certified.any())


def test_independent_components_of_the_first_layer_are_near_the_images():
    """Sparse images are far from Gaussian; the paper's objective has no exact answer."""
    stream = rng.generator(1, "party")
    images = torch.rand(3, 1, 16, 16, generator=stream)
    images = images * (torch.rand(3, 1, 16, 16, generator=stream) > 0.85)
    observation, truth = make_observation(images, torch.tensor([1, 4, 7]), **MLP)
    attack = CocktailParty(iterations=800, total_variation=0.0)
    found = attacked(attack, (observation, truth))
    assert found.determined is None
    errors = (found.images[order(found.images, images)] - truth.images).square().mean()
    assert float(errors) < 0.1 * float(images.var())


def test_the_cocktail_party_attack_inverts_the_embeddings_that_it_unmixes():
    """Its second half: pixels descend to where their embeddings are the unmixed ones."""
    images = torch.rand(2, 3, 32, 32, generator=rng.generator(0, "embeddings"))
    observation, truth = make_observation(images, torch.tensor([1, 2]), **RESNET)

    def missed(**steps):
        found = attacked(CocktailParty(iterations=20, **steps), (observation, truth))
        assert bool((found.images >= 0).all()) and bool((found.images <= 1).all())
        assert found.iterations == 20 + steps["image_iterations"]
        with torch.no_grad():
            embedded = rebuild(observation).features(normalize(found.images, observation.model))
        return float(
            1 - F.cosine_similarity(embedded, found.features).square().mean()
        ), found.features

    assert attacked(CocktailParty(iterations=20), (observation, truth)).images is None
    (first, start), (last, end) = missed(image_iterations=1), missed(image_iterations=40)
    assert torch.equal(start, end) and last < 0.5 * first


@pytest.mark.parametrize(
    ("attack", "off"),
    [(ExtremeRays(), 0), (Spear(iterations=2), 32), (Spear(iterations=2, search="descent"), 32)],
    ids=["extreme_rays", "spear", "spear_by_descent"],
)
def test_a_mixture_of_images_that_activate_the_same_neurons_is_not_determined(attack, off):
    """Of two classes their error signals have one direction, and the gradient shows their sum."""
    images = torch.rand(2, 1, 8, 8, generator=rng.generator(0, "mixture"))
    labels = torch.zeros(2, dtype=torch.int64)
    before, _ = make_observation(images, labels, num_classes=2, **SHALLOW)
    biases = torch.full((64,), 20.0)
    biases[:off] = -20.0
    weights = {**before.parameters, "body.1.bias": biases}
    observation, truth = make_observation(images, labels, num_classes=2, **SHALLOW, weights=weights)
    found = attacked(attack, (observation, truth))
    assert float((found.images[:1] - truth.images).abs().amax((1, 2, 3)).min()) > 0.1
    assert not bool(found.determined.any())
