"""A model's size is counted as torch computes it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plugins_here import registered
from torch import Tensor, nn

from fedsim.contracts.plugins import PluginError
from fedsim.learners.sgd import SGD
from fedsim.models.base import size_of
from fedsim.models.size import count_size
from fedsim.types import ModelSpec


class Layer(nn.Module):
    """Applies a function that a third party's model calls in its own way."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


WEIGHT = torch.zeros(6, 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.relu(input=x),
        lambda x: F.linear(x, weight=WEIGHT.to(x.device)),
        lambda x: F.linear(input=x, weight=WEIGHT.to(x.device)),
        lambda x: F.linear(x, WEIGHT[0].to(x.device)),
        lambda x: torch.sigmoid(x.long()),
        lambda x: torch.tanh(x, out=x.new_empty(x.shape)),
        lambda x: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
    ],
)
def test_functions_are_counted_however_they_are_called(
    function: Callable[[Tensor], Tensor],
) -> None:
    size = count_size(lambda: Layer(function), (3, 4, 5))
    real = function(torch.zeros(1, 3, 4, 5))
    assert size is not None
    assert size.image == real.numel() * real.element_size()


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d((3, 2), stride=(1, 2), padding=1, dilation=(1, 2)),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Conv2d(3, 6, (2, 3), stride=(1, 2), padding=(0, 2), dilation=(2, 1), groups=3),
        nn.Conv2d(3, 6, 3, padding="same"),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
    ],
    ids=str,
)
def test_windows_are_counted_as_torch_computes_them(layer: nn.Module) -> None:
    size = count_size(lambda: deepcopy(layer).to("meta"), (3, 4, 5))
    assert size is not None and size.image == 4 * layer(torch.zeros(1, 3, 4, 5)).numel()


def test_numbers_that_are_there_are_computed() -> None:
    def build() -> nn.Module:
        shares = torch.sigmoid(torch.zeros(2, device="cpu"))
        return nn.Linear(4, int(shares.sum() * 10))

    size = count_size(build, (1, 1, 4))
    assert size is not None and size.state == 4 * (4 * 10 + 10)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: nn.GroupNorm(2, 4),
        lambda: nn.Linear(4, 2),
        lambda: nn.Conv2d(4, 2, 1),
        lambda: nn.Conv2d(3, 2, 6),
        lambda: nn.MaxPool2d(6),
        lambda: nn.MaxPool2d(2, padding=2),
    ],
)
def test_a_layer_that_does_not_fit_its_input_has_no_size(broken: Callable[[], nn.Module]) -> None:
    assert count_size(broken, (3, 4, 5)) is None


def test_a_model_that_no_memory_holds_is_counted() -> None:
    size = count_size(lambda: nn.Conv2d(100_000, 100_000, 3), (100_000, 4, 4))
    assert size is not None
    assert (size.state, size.image) == (4 * (9 * 10**10 + 10**5), 4 * 4 * 10**5)


def test_what_is_no_model_has_no_size() -> None:
    given: Any = {"parameters": {}, "input_shape": (1, 8, 8), "num_classes": 2}
    spec = ModelSpec(name="idle", mean=(0.5,), std=(0.5,), **given)
    with registered({"models": {"idle": SGD}}), pytest.raises(PluginError, match="ModelPlugin"):
        size_of(spec)
