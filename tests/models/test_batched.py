"""Clients that are trained at once have the updates of clients trained one after the other."""

import pytest
import torch
from torch import nn

from fedsim.models.base import build
from fedsim.models.local import (
    gradient,
    local_update,
    local_updates,
    loss_function,
    require_batched,
)
from fedsim.types import FedsimError, LocalTraining, ModelSpec, StepRule

CLIENTS, BATCH, CLASSES = 5, 3, 4
SHAPE = (2, 9, 9)


def make_model(name="mlp", **parameters):
    spec = ModelSpec(
        name=name,
        parameters=parameters,
        input_shape=SHAPE,
        num_classes=CLASSES,
        mean=(0.4, 0.6),
        std=(0.2, 0.3),
    )
    return build(spec, 0).double()


def draw(model, steps):
    """Different weights and batches for each client."""
    stream = torch.Generator().manual_seed(1)
    weights = {
        n: p.detach() + 0.01 * torch.randn(CLIENTS, *p.shape, generator=stream, dtype=p.dtype)
        for n, p in model.named_parameters()
    }
    batches = [
        (
            torch.randn(CLIENTS, BATCH, *SHAPE, generator=stream, dtype=torch.float64),
            torch.randint(CLASSES, (CLIENTS, BATCH), generator=stream),
        )
        for _ in range(steps)
    ]
    return weights, batches


def training(**changes):
    values = {"algorithm": "fedavg", "steps": 3, "batch_size": BATCH, "lr": 0.2}
    return LocalTraining(**{**values, **changes})


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


def test_batch_norm_in_training_mode_is_refused():
    with pytest.raises(FedsimError, match="norm: group"):
        require_batched(make_model("convnet", width=4, norm="batch"), training())


def test_dropout_in_training_mode_is_refused():
    model = make_model(head={"width": 8})
    with pytest.raises(FedsimError, match="dropout"):
        require_batched(model, training(dropout=0.5))
    require_batched(model, training(dropout=0.5, mode="eval"))
    model.install(nn.Sequential(model.body, nn.Dropout(0.1)), model.head)
    with pytest.raises(FedsimError, match="dropout"):
        require_batched(model, training())
