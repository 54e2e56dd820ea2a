"""Gradient matching: zero at the truth, whatever the client did, and exact gradients elsewhere."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_but
from torch import nn
from torch.func import functional_call

from fedsim.models.base import normalize
from fedsim.rng import generator
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining, StepRule
from fedsim_attacks.fast_autograd import _second_order
from fedsim_attacks.fast_autograd._convolution import Patches, Winograd
from fedsim_attacks.fast_autograd._second_order import accelerate
from fedsim_attacks.fast_autograd._tape import PAYS
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    MatchedUpdate,
    Matching,
    cosine_distance,
    gaussian_distance,
    negative_log_likelihood,
    reweighted_cosine,
    squared_distance,
)

over_distances = pytest.mark.parametrize("distance", [cosine_distance, squared_distance])

FEDAVG = {"algorithm": "fedavg", "lr": 0.1, "steps": 3}
BATCH_NORM = {"model": "convnet", "model_parameters": {"width": 4, "norm": "batch"}}
AGGREGATE = {"defense": [{"name": "aggregate"}], "num_clients": 2}

CASES = {
    "one gradient": {},
    "fedavg, same batch": {"training": {**FEDAVG, "batches": "same"}},
    "fedavg, different batches": {"training": {**FEDAVG, "batches": "different"}},
    "fedavg, momentum": {"training": {**FEDAVG, "momentum": 0.9}},
    "batch norm, train mode": {**BATCH_NORM, "training": {"mode": "train"}},
    "batch norm, eval mode": {**BATCH_NORM, "training": {"mode": "eval"}},
    "batch norm, fedavg": {**BATCH_NORM, "training": {**FEDAVG, "mode": "train"}},
    "accelerated layers": {"model": "convnet", "model_parameters": {"norm": "batch"}},
    "two clients": AGGREGATE,
    "two clients, fedavg": {**AGGREGATE, "training": FEDAVG},
    "two clients, batch norm": {**AGGREGATE, **BATCH_NORM},
}
over_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def observe(case, batch_size=2):
    fields = {"algorithm": "fedsgd", "steps": 1, "lr": 0.1, **case.get("training", {})}
    training = LocalTraining(batch_size=batch_size, **fields)
    batch = example_batch(training.num_images * case.get("num_clients", 1))
    return make_observation(*batch, **{**case, "training": training})


def objective(observation, images, labels, distance):
    """At pixels `images`."""
    matching = Matching(observation)
    candidate = Candidate(normalize(images, observation.model), labels)
    return float(matching.differentiate(candidate, distance)[0])


@over_distances
@over_cases
def test_the_objective_is_zero_at_the_truth(case, distance):
    observation, truth = observe(case)
    assert abs(objective(observation, truth.images, truth.labels, distance)) < 1e-6
    assert objective(observation, 1 - truth.images, truth.labels, distance) > 1e-3
    wrong = (truth.labels + 1) % observation.model.num_classes
    assert objective(observation, truth.images, wrong, distance) > 1e-3


RULES = {
    "adam": StepRule(optimizer="adam", weight_decay=0.01),
    "adamw": StepRule(optimizer="adamw", weight_decay=0.01),
    "decay": StepRule(weight_decay=0.1),
    "rates that fall": StepRule(rates=(0.1, 0.05, 0.01)),
    "adam, rates that fall": StepRule(optimizer="adam", rates=(0.1, 0.05, 0.01)),
}


@pytest.mark.parametrize("distance", [cosine_distance, squared_distance, gaussian_distance])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_objective_is_zero_at_the_truth_under_every_rule(rule, distance):
    """Another rule, and so another update, is not taken for the declared one."""
    momentum = 0.9 if rule.optimizer == "sgd" else 0.0
    training = {**FEDAVG, "lr": 0.01, "momentum": momentum, "rule": rule}
    observation, truth = observe({"training": training})
    assert abs(objective(observation, truth.images, truth.labels, distance)) < 1e-6
    untold = replace(observation, training=replace(observation.training, rule=None))
    assert objective(untold, truth.images, truth.labels, distance) > 1e-4


def test_decay_moves_weights_that_meet_only_padding(monkeypatch):
    monkeypatch.setattr(_second_order, "_WORTHWHILE", 0)
    observed = {"stem": "imagenet", "width": 8, "norm": "group"}
    for rule in (None, StepRule(weight_decay=1.0)):
        training = LocalTraining(algorithm="fedavg", steps=1, batch_size=1, lr=0.01, rule=rule)
        images = torch.rand(1, 3, 17, 17, generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([1])
        observation, _ = make_observation(
            images, labels, model="resnet18", model_parameters=observed, training=training
        )
        assert bool(Matching(observation)._windows) == (rule is None)
        for distance in (cosine_distance, squared_distance):
            assert abs(objective(observation, images, labels, distance)) < 1e-6


def flat(tensors):
    return torch.cat([each.flatten() for each in tensors])


def cosine(update, target):
    u, t = flat(update), flat(target)
    return 1 - F.cosine_similarity(u, t, dim=0)


def squared(update, target):
    u, t = flat(update), flat(target)
    return (u - t).square().sum() / t.square().sum()


def gaussian(update, target):
    each = [
        (1 - torch.exp(-(u - t).square().sum() / t.square().sum())) / place
        for place, (u, t) in enumerate(zip(update, target, strict=True), 1)
    ]
    return sum(each) / (1 + 1 / 2)


def likelihood(scaled):
    """Of normal noise, up to the density at its mode; an unknown factor is the likeliest."""

    def value(update, target):
        u, t = flat(update), flat(target)
        factors = torch.linspace(0, 2, 20_001)[:, None] if scaled else torch.ones(1, 1)
        noise = torch.distributions.Normal(t, 0.3**0.5)
        return -(noise.log_prob(factors * u) - noise.log_prob(t)).sum(1).max() / 7

    return value


def weighted(update, target):
    """The weighted sum of cosines' distances from 1."""
    return sum(w * cosine([u], [t]) for w, u, t in zip((1, 3), update, target, strict=True))


@pytest.mark.parametrize(
    ("distance", "formula"),
    [
        (cosine_distance, cosine),
        (squared_distance, squared),
        (gaussian_distance, gaussian),
        (negative_log_likelihood(0.3, 7, False), likelihood(False)),
        (negative_log_likelihood(0.3, 7, True), likelihood(True)),
        (reweighted_cosine([1.0, 3.0], summed=True), weighted),
        (reweighted_cosine([1.0, 3.0]), lambda u, t: weighted(u, t) / 4),
    ],
    ids=["cosine", "squared", "gaussian", "likelihood", "scaled", "sum of cosines", "mean"],
)
def test_a_distance_is_its_formula_with_its_derivative(distance, formula):
    stream = torch.Generator().manual_seed(0)
    target = [torch.randn(shape, generator=stream) for shape in ((3, 2), (4,))]
    update = [t + 0.5 * torch.randn(t.shape, generator=stream) for t in target]
    leaves = [u.clone().requires_grad_() for u in update]
    value = formula(leaves, target)
    found, direction, scale = distance(update, target_of(target))
    torch.testing.assert_close(found, value.detach(), rtol=1e-4, atol=1e-6)
    for own, other in zip(direction, torch.autograd.grad(value, leaves), strict=True):
        torch.testing.assert_close(scale * own, other, rtol=1e-3, atol=1e-4)


@over_distances
@over_cases
def test_the_gradient_is_that_of_the_objective(case, distance, monkeypatch):
    """By differences in double precision."""
    monkeypatch.setattr(_second_order, "_WORTHWHILE", 0)
    observation, truth = observe(case)
    images = normalize(1 - truth.images.double(), observation.model)
    along = torch.randn(images.shape, generator=generator(0, "along"), dtype=torch.float64)
    matching = Matching(observation, torch.float64)

    def evaluate(step):
        return matching.differentiate(Candidate(images + step * along, truth.labels), distance)

    (ahead, _), (behind, _), (_, (slope,)) = (evaluate(step) for step in (1e-7, -1e-7, 0))
    expected = float(ahead - behind) / 2e-7
    assert float((slope * along).sum()) == pytest.approx(expected, rel=1e-4)


LAYERS = {
    "plain": lambda: [nn.Conv2d(4, 6, 3, padding=1)],
    "stride": lambda: [nn.Conv2d(4, 6, 3, stride=2, padding=1)],
    "uneven": lambda: [nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1))],
    "uneven padding": lambda: [nn.Conv2d(4, 6, 3, padding=(2, 0))],
    "dilation": lambda: [nn.Conv2d(4, 6, 3, dilation=2, padding=2)],
    "no padding": lambda: [nn.Conv2d(4, 6, 3)],
    "no bias": lambda: [nn.Conv2d(4, 6, 3, padding=1, bias=False)],
    "pointwise": lambda: [nn.Conv2d(4, 6, 1, stride=2, bias=False)],
    "groups": lambda: [nn.Conv2d(4, 6, 3, padding=1, groups=2)],
    "depthwise": lambda: [nn.Conv2d(4, 4, 3, padding=1, groups=4)],
    "padding by name": lambda: [nn.Conv2d(4, 6, 3, padding="same")],
    "reflection": lambda: [nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")],
    "batch norm": lambda: [nn.BatchNorm2d(4)],
    "batch norm without statistics": lambda: [nn.BatchNorm2d(4, track_running_stats=False)],
    "batch norm without weights": lambda: [nn.BatchNorm2d(4, affine=False)],
    "group norm": lambda: [nn.GroupNorm(2, 4)],
    "group norm of one group": lambda: [nn.GroupNorm(1, 4)],
    "relu": lambda: [nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)],
    "max pool": lambda: [nn.MaxPool2d(2)],
    "overlapping max pool": lambda: [nn.MaxPool2d((3, 2), stride=2, padding=1, ceil_mode=True)],
    "all": lambda: [nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.GroupNorm(3, 6)],
}


def network(middle):
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.Softplus(), *middle, nn.Tanh()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(3))
        model(torch.zeros(2, 2, 6, 6))
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                torch.nn.init.uniform_(tensor, 0.2, 0.9)
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.ndim > 1:
                torch.nn.init.normal_(parameter)
    return model.double()


def second_derivative(model, images, toward):
    """∂<g, v>/∂x for the gradient g of the loss after one step of descent, v fixed."""
    images = images.clone().requires_grad_()
    labels = torch.arange(len(images)) % 3
    weights = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(2):
        loss = F.cross_entropy(functional_call(model, (weights, buffers), (images,)), labels)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    stream = torch.Generator().manual_seed(toward)
    v = [torch.randn(g.shape, generator=stream, dtype=g.dtype) for g in grads]
    return torch.autograd.grad(grads, images, v)[0]


def force(algorithm, monkeypatch):
    """Convolutions use `algorithm` wherever it applies, however small they are."""
    monkeypatch.setattr(_second_order, "_WORTHWHILE", 0)
    monkeypatch.setattr(
        Patches, "pays", lambda problem: algorithm == "patches" and problem.geometry.groups == 1
    )
    monkeypatch.setattr(Winograd, "pays", lambda problem: algorithm == "winograd")


@pytest.mark.parametrize("algorithm", ["direct", "patches", "winograd"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())
def test_accelerated_layers_are_pytorchs(layers, training, algorithm, monkeypatch):
    force(algorithm, monkeypatch)
    plain = network(layers()).train(training)
    fast = deepcopy(plain)
    accelerate(fast)
    assert "forward" in vars(fast[0])
    # Of Winograd's tiles of 4x4, the last ones are whole in one direction alone.
    stream = torch.Generator().manual_seed(1)
    images = torch.randn(3, 2, 7, 8, generator=stream, dtype=torch.float64)
    torch.testing.assert_close(fast(images), plain(images), rtol=1e-10, atol=1e-10)
    expected = second_derivative(plain, images, toward=2)
    found = second_derivative(fast, images, toward=2)
    assert float(expected.abs().max()) > 1e-6
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * scale)


def test_small_models_are_left_alone():
    model = network([])
    accelerate(model)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("case", slow_but(["one gradient", "batch norm, train mode"], CASES))
@pytest.mark.parametrize(
    ("distance", "soft"),
    [(cosine_distance, False), pytest.param(squared_distance, True, marks=pytest.mark.slow)],
)
def test_replayed_iterations_are_the_same_bits(case, distance, soft):
    observation, truth = observe(case)
    results = []
    for calls in (1, PAYS):
        generator = torch.Generator().manual_seed(3)
        matching = Matching(observation, calls=calls)
        candidate = matching.random_candidate(None if soft else truth.labels, generator)
        for _ in range(4):
            loss, slopes = matching.differentiate(candidate, distance)
            results.append([loss, *slopes])
            with torch.no_grad():
                for variable, slope in zip(candidate.variables, slopes, strict=True):
                    variable -= slope / slope.abs().max()
    for eager, replayed in zip(results[:4], results[4:], strict=True):
        assert all(map(torch.equal, eager, replayed))


def drawn_update(seed, *sizes):
    """Tensors whose entries have these sizes."""
    stream = generator(seed, "distances")
    return [size * torch.randn(4, 5, generator=stream) for size in sizes]


def target_of(tensors):
    square = torch.stack([t.square().sum() for t in tensors]).sum()
    return MatchedUpdate(tensors, square, torch.zeros(()))


@pytest.mark.parametrize("distance", [cosine_distance, reweighted_cosine([1.0, 2.0])])
@pytest.mark.parametrize("wanted", [1.0, 1e-6, 1e-15])
@pytest.mark.parametrize("size", [1e8, 1.0, 1e-12, 1e-17, 1e-20, 1e-25, 0.0])
def test_a_distance_of_directions_is_between_0_and_2(distance, wanted, size):
    target = target_of(drawn_update(1, wanted, wanted))
    for update in (drawn_update(2, size, size), [size / wanted * t for t in target.tensors]):
        loss, direction, scale = distance(update, target)
        assert -1e-5 <= float(loss) <= 2 + 1e-5
        assert bool(scale.isfinite()) and all(bool(each.isfinite().all()) for each in direction)


@pytest.mark.parametrize("distance", [cosine_distance, reweighted_cosine([1.0, 2.0])])
def test_a_direction_is_the_same_at_every_size(distance):
    target = target_of(drawn_update(1, 1e-6, 1e-6))
    usual = float(distance(drawn_update(2, 1.0, 1.0), target)[0])
    for size in (1e6, 1e-8, 1e-14, 1e-16):
        assert float(distance(drawn_update(2, size, size), target)[0]) == pytest.approx(
            usual, rel=1e-4
        )


def test_where_all_that_counts_is_zero_entries_weigh_alike():
    """As of a classifier that starts at zero, before which nothing has a gradient."""
    target, update = target_of(drawn_update(1, 1.0, 0.0)), drawn_update(2, 1.0, 1.0)
    found = reweighted_cosine([0.0, 3.0])(update, target)
    alone = cosine_distance(update[:1], target_of(target.tensors[:1]))
    assert float(found[0]) == pytest.approx(float(alone[0]), rel=1e-5)
    assert all(bool(each.isfinite().all()) for each in found[1])


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_an_entry_that_was_removed_for_its_size_was_small(scope):
    """Nothing is amiss at the truth, also of a clipped update; elsewhere large ones are."""
    images, labels = example_batch(1)
    pruning = {"name": "gradient_pruning", "ratio": 0.9, "scope": scope}
    seen, _ = make_observation(images, labels, defense=[{"name": "clip", "norm": 1e-3}, pruning])

    def distance(at, effect):
        matching = Matching(replace(seen, effect=effect), effects="simulated")
        candidate = Candidate(normalize(at, seen.model), labels)
        return float(matching.differentiate(candidate, cosine_distance)[0])

    anything = replace(seen.effect, removed="others")
    assert distance(images, seen.effect) < 1e-5
    assert distance(1 - images, seen.effect) > 1.01 * distance(1 - images, anything)
