"""Defenses compute on a CUDA device what they compute on the CPU, from the same CPU stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense
from fedsim.testing.cases import local_step, mixed_update, stream
from fedsim.types import Tensors
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.gradient_pruning import GradientPruning
from fedsim_defenses.quantization import Quantization
from fedsim_defenses.top_k import TopK

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "defense",
    [
        Clip(norm=0.5),
        GaussianNoise(std=0.3),
        GradientPruning(ratio=0.5),
        TopK(ratio=0.3),
        Quantization(bits=4),
    ],
)
def test_an_update_on_the_device(defense: UpdateDefense) -> None:
    update = mixed_update()
    moved = {name: tensor.cuda() for name, tensor in update.items()}
    here, _ = defense.apply(update, defense.init(update, 1.0), stream())
    there, _ = defense.apply(moved, defense.init(moved, 1.0), stream())
    assert all(tensor.is_cuda for tensor in there.values())
    torch.testing.assert_close({n: t.cpu() for n, t in there.items()}, dict(here))


def test_dp_sgd_on_the_device() -> None:
    defense = DPSGD(norm=0.5, noise_multiplier=1.0)

    def loss(at: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        return (images.flatten(1) @ at["a"] - labels).square().mean()

    direction = defense.gradient(local_step(loss, lambda *_: {}, 3))
    at, x, y = torch.ones(4), torch.randn(3, 1, 2, 2, generator=stream()), torch.arange(3.0)
    here = direction({"a": at}, x, y, stream())["a"]
    there = direction({"a": at.cuda()}, x.cuda(), y.cuda(), stream())["a"]
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-5)
