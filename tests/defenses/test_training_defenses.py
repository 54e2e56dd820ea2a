"""Dropout and LocalAggregation: what they make of the declared training."""

from __future__ import annotations

from dataclasses import replace

import pydantic
import pytest
import torch

from fedsim import rng
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import chain
from fedsim.models.local import gradient, local_update, loss_function
from fedsim.models.mlp import MLP
from fedsim.testing.cases import local_step, same, stream
from fedsim.types import LocalTraining
from fedsim_defenses.dropout import Dropout
from fedsim_defenses.local_aggregation import LocalAggregation

DECLARED = LocalTraining(
    algorithm="fedsgd", steps=1, batch_size=2, lr=0.1, momentum=0.0, mode="train"
)


def test_dropout_declares_its_rate_and_nothing_else() -> None:
    assert Dropout(rate=0.3).training(DECLARED) == replace(DECLARED, dropout=0.3)


def test_local_aggregation_declares_steps_of_fedavg() -> None:
    found = LocalAggregation(steps=5, batches="same").training(DECLARED)
    assert found == replace(DECLARED, algorithm="fedavg", steps=5, batches="same")
    assert found.num_images == 2
    assert LocalAggregation(steps=5).training(DECLARED).num_images == 10


@pytest.mark.parametrize("defense", [Dropout(rate=0.3), LocalAggregation(steps=5)])
def test_neither_proves_anything(defense: Dropout | LocalAggregation) -> None:
    assert defense.guarantee(Guarantee(), DECLARED) == Guarantee()


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(pydantic.ValidationError):
        Dropout(rate=rate)


def test_dropout_reaches_the_gradient_of_a_real_model() -> None:
    model = MLP(head={"width": 64}).build((1, 4, 4), 3)  # type: ignore[arg-type]
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    images, labels = torch.randn(2, 1, 4, 4, generator=stream()), torch.tensor([0, 2])

    def rows_without_gradient(rate: float) -> int:
        stack = chain(Dropout(rate=rate))
        loss = loss_function(model, {}, stack.training(DECLARED))
        direction = stack.gradient(
            local_step(loss, lambda at, x, y, _: gradient(loss, at, x, y), 2)
        )
        with rng.global_stream(3):
            found = direction(parameters, images, labels, stream())["head.output.weight"]
        return int((found == 0).all(0).sum())

    # a neuron is dead for an image with probability about 1/2; dropping 90% leaves few alive
    assert rows_without_gradient(0.9) > rows_without_gradient(0.0) + 10


def test_one_local_step_is_the_gradient_in_weight_units() -> None:
    model = MLP().build((1, 4, 4), 3)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    batch = torch.randn(2, 1, 4, 4, generator=stream()), torch.tensor([0, 2])
    loss = loss_function(model, {}, DECLARED)
    one = LocalAggregation(steps=1).training(DECLARED)
    update = local_update(lambda *at: gradient(loss, *at), parameters, [batch], one)
    expected = gradient(loss, parameters, *batch)
    assert not same(update, expected)
    for name, value in update.items():
        torch.testing.assert_close(value, -0.1 * expected[name], rtol=1e-3, atol=1e-7)
