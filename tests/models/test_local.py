"""Local training against torch.optim and autograd, as known answers, and of clients at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedsim.models.base import build, denormalize, normalize
from fedsim.models.local import (
    _require_batched,
    gradient,
    local_update,
    local_updates,
    loss_function,
)
from fedsim.types import FedsimError, LocalTraining, ModelSpec, StepRule

STEPS, BATCH, CLASSES = 4, 3, 3


def make_spec(name="convnet", shape=(2, 9, 9), **parameters):
    return ModelSpec(
        name=name,
        parameters=parameters,
        input_shape=shape,
        num_classes=CLASSES,
        mean=(0.4, 0.6),
        std=(0.2, 0.3),
    )


def training(**changes):
    values = {"algorithm": "fedavg", "steps": STEPS, "batch_size": BATCH, "lr": 0.3}
    return LocalTraining(**{**values, **changes})


def setup(model, steps=STEPS, seed=0):
    """(parameters, buffers, batches), none of them shared with the model."""
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    batches = [
        (
            torch.randn(BATCH, 2, 9, 9, generator=generator, dtype=dtype),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]
    return parameters, buffers, batches


def run(model, parameters, buffers, batches, how, create_graph=False):
    loss = loss_function(model, buffers, how)
    return local_update(
        lambda at, images, labels: gradient(loss, at, images, labels, create_graph=create_graph),
        parameters,
        batches,
        how,
    )


def reference(model, batches, lr, momentum, mode):
    """What torch.optim.SGD makes of `batches`; changes `model`."""
    model.train(mode == "train")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test_fedsgd_is_the_gradient_of_the_mean_loss():
    model = build(make_spec(width=2, norm="batch"), seed=0)
    parameters, buffers, batches = setup(model, steps=1)
    update = run(model, parameters, buffers, batches, training(algorithm="fedsgd", steps=1))
    ((images, labels),) = batches
    F.cross_entropy(model.train()(images), labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(update[name], parameter.grad, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_several_steps_are_those_of_torch_optim(momentum, mode):
    how = training(momentum=momentum, mode=mode)
    model = build(make_spec(width=2, norm="batch"), seed=0).double()
    parameters, buffers, batches = setup(model)
    update = run(model, parameters, buffers, batches, how)
    reference(model, batches, how.lr, momentum, mode)
    for name, after in model.named_parameters():
        torch.testing.assert_close(parameters[name] + update[name], after.detach())
        assert float(update[name].abs().max()) > 0 or name.endswith("bias")
    for name, after in model.named_buffers():
        torch.testing.assert_close(buffers[name], after)


RULES = {
    "nesterov": (
        {"nesterov": True, "weight_decay": 0.02},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.02),
    ),
    "adam": (
        {"optimizer": "adam", "betas": (0.8, 0.95), "weight_decay": 0.02},
        lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.8, 0.95), weight_decay=0.02),
    ),
    "adamw": (
        {"optimizer": "adamw", "eps": 1e-3, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.3, eps=1e-3, weight_decay=0.1),
    ),
    "rates": (
        {"rates": (0.3, 0.15, 0.075, 0.0375)},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    ),
    "proximal": ({"proximal": 0.5}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
    "loss": (
        {"label_smoothing": 0.2, "class_weights": (1.0, 2.0, 0.5)},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_steps_of_a_rule_are_those_of_torch_optim(name):
    fields, make = RULES[name]
    rule, how = StepRule(**fields), training(momentum=0.9, rule=StepRule(**fields))
    model = build(make_spec(width=2), seed=0).double()
    parameters, buffers, batches = setup(model)
    update = run(model, parameters, buffers, batches, how)
    weights = rule.class_weights and torch.tensor(rule.class_weights).double()
    optimizer = make(model.parameters())
    halved = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if rule.rates else 1.0)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(images), labels, weight=weights, label_smoothing=rule.label_smoothing
        )
        moved = [(p - parameters[n]).square().sum() for n, p in model.named_parameters()]
        (loss + rule.proximal / 2 * sum(moved)).backward()
        optimizer.step()
        halved.step()
    for each, after in model.named_parameters():
        torch.testing.assert_close(parameters[each] + update[each], after.detach())


def test_an_adam_step_can_be_differentiated_where_its_gradient_is_zero():
    how = training(steps=1, rule=StepRule(optimizer="adam"))
    model = build(make_spec(width=2), seed=0).double()
    parameters, buffers, ((images, labels),) = setup(model, steps=1)
    images.requires_grad_()
    update = run(model, parameters, buffers, [(0 * images, labels)], how, create_graph=True)
    (slope,) = torch.autograd.grad(sum(each.sum() for each in update.values()), images)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_only_the_given_buffers_are_written(mode):
    model = build(make_spec(width=2, norm="batch"), seed=0)
    parameters, buffers, batches = setup(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    originals = {name: value.clone() for name, value in parameters.items()}
    images = batches[0][0].clone()
    floating = {name: value for name, value in buffers.items() if value.is_floating_point()}
    run(model, parameters, floating, batches, training(mode=mode))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(originals[name], value) for name, value in parameters.items())
    assert torch.equal(images, batches[0][0])
    moved = any(not torch.equal(before[name], value) for name, value in floating.items())
    assert moved == (mode == "train")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", {"hidden": [3], "activation": "tanh"}),
        pytest.param(
            "convnet",
            {"width": 1, "norm": "batch", "activation": "softplus"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_update_is_differentiable_in_the_images(name, parameters):
    model = build(make_spec(name, **parameters), seed=0).double()
    weights, buffers, batches = setup(model, steps=2)
    how = training(steps=2, momentum=0.5)
    labels = [labels for _, labels in batches]
    # Two pixels per step are varied, so that the numeric Jacobian stays small.
    fixed = torch.stack([images for images, _ in batches])

    def update(pixels):
        images = fixed.clone()
        images[:, 0, 0, 4, 4:6] = pixels
        own = {key: value.clone() for key, value in buffers.items()}
        pairs = list(zip(images, labels, strict=True))
        result = run(model, weights, own, pairs, how, create_graph=True)
        return torch.cat([tensor.flatten() for tensor in result.values()])

    assert torch.autograd.gradcheck(update, fixed[:, 0, 0, 4, 4:6].clone().requires_grad_())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("convnet", {"width": 2}),
        ("kan", {"hidden": 5}),
        ("kan", {"hidden": 5, "train": "first"}),
        ("mlp", {}),
        ("resnet18", {"width": 2, "norm": "group"}),
    ],
)
def test_per_example_gradients_by_vmap_are_those_of_single_examples(name, parameters):
    model = build(make_spec(name, **parameters), seed=0).double()
    weights, buffers, ((images, labels),) = setup(model, steps=1)
    loss = loss_function(model, buffers, training())

    def one(at, image, label):
        return loss(at, image[None], label[None])

    each = vmap(grad(one), in_dims=(None, 0, 0))(weights, images, labels)
    single = gradient(loss, weights, images[1:2], labels[1:2])
    for key in weights:
        torch.testing.assert_close(each[key][1], single[key])


def test_batch_norm_on_a_single_value_is_refused_with_a_remedy():
    model = build(make_spec("resnet18", (2, 8, 8), width=2), seed=0)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    image, label = torch.zeros(1, 2, 8, 8), torch.tensor([0])
    with pytest.raises(FedsimError, match="batch of at least 2"):
        loss_function(model, buffers, training())(parameters, image, label)
    loss_function(model, buffers, training(mode="eval"))(parameters, image, label)


def test_normalize_and_denormalize_are_inverse_and_per_channel():
    spec = make_spec()
    pixels = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    images = normalize(pixels, spec)
    torch.testing.assert_close(images[:, 1], (pixels[:, 1] - 0.6) / 0.3)
    torch.testing.assert_close(denormalize(images, spec), pixels)
    assert images.dtype == torch.float64


CLIENTS = 5


def make_model(name="mlp", **parameters):
    return build(make_spec(name, **parameters), seed=0).double()


def draw(model, steps):
    """Different weights and batches for each client."""
    stream = torch.Generator().manual_seed(1)
    weights = {
        n: p.detach() + 0.01 * torch.randn(CLIENTS, *p.shape, generator=stream, dtype=p.dtype)
        for n, p in model.named_parameters()
    }
    batches = [
        (
            torch.randn(CLIENTS, BATCH, 2, 9, 9, generator=stream, dtype=torch.float64),
            torch.randint(CLASSES, (CLIENTS, BATCH), generator=stream),
        )
        for _ in range(steps)
    ]
    return weights, batches


ADAM = StepRule(optimizer="adam", weight_decay=0.01, proximal=0.1, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (make_model(hidden=(6,)), training(momentum=0.9)),
        (make_model(hidden=(6,)), training(rule=ADAM)),
        (make_model("lenet"), training()),
        (make_model("convnet", width=4), training(algorithm="fedsgd", steps=1)),
        (make_model("convnet", width=4, norm="batch"), training(mode="eval")),
    ],
    ids=["momentum", "adam", "lenet", "fedsgd", "frozen batch norm"],
)
def test_updates_are_those_of_serial_training(model, how):
    weights, batches = draw(model, how.steps)
    buffers = dict(model.named_buffers())
    found = local_updates(model, weights, buffers, batches, how)
    loss = loss_function(model, buffers, how)
    for k in range(CLIENTS):
        expected = local_update(
            lambda at, images, labels: gradient(loss, at, images, labels),
            {name: value[k] for name, value in weights.items()},
            [(images[k], labels[k]) for images, labels in batches],
            how,
        )
        for name, value in expected.items():
            torch.testing.assert_close(found[name][k], value, rtol=1e-9, atol=1e-11)


def test_what_clients_cannot_share_is_refused():
    with pytest.raises(FedsimError, match="norm: group"):
        _require_batched(make_model("convnet", width=4, norm="batch"), training())
    model = make_model(head={"width": 8})
    with pytest.raises(FedsimError, match="dropout"):
        _require_batched(model, training(dropout=0.5))
    _require_batched(model, training(dropout=0.5, mode="eval"))
    model.install(nn.Sequential(model.body, nn.Dropout(0.1)), model.head)
    with pytest.raises(FedsimError, match="dropout"):
        _require_batched(model, training())
