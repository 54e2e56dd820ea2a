"""The low bits of a noisy float must not tell the value that noise was added to (Mironov 2012)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import ServerRound, add_gaussian
from fedsim.testing.cases import local_step, stream
from fedsim.types import Tensors, Update
from fedsim_defenses.correlated_noise import CorrelatedNoise
from fedsim_defenses.dp_ftrl import DPFTRL
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.gaussian_noise import GaussianNoise

ENTRIES = 200_000


def noisy_update(value: float) -> Tensor:
    defense = GaussianNoise(std=1.0)
    update = {"w": torch.full((ENTRIES,), value)}
    return defense.apply(update, defense.init(update, 1.0), stream(1))[0]["w"]


def noisy_sum(value: float) -> Tensor:
    defense = DPFTRL(noise_multiplier=1.0, correlation=0.5)
    update = Update(tensors={"w": torch.full((ENTRIES,), value)}, num_examples=1)
    asked = ServerRound(clients=1, sensitivity=1.0, stream=stream(1), before=stream(2))
    return defense.add_noise(defense.combine([update]), asked).tensors["w"]


def noisy_step(defense: Any, value: float) -> Tensor:
    def loss(at: Tensors, image: Tensor, label: Tensor) -> Tensor:
        return value * at["w"].sum() + 0 * image.sum()

    step = defense.gradient(local_step(loss, None, 1))
    parameters = {"w": torch.zeros(ENTRIES)}
    images, labels = torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
    found: Tensor = step(parameters, images, labels, stream(1))["w"]
    return found


STEPS: list[Any] = [
    DPSGD(norm=1000.0, noise_multiplier=0.001),
    CorrelatedNoise(norm=1000.0, noise_multiplier=0.001, correlation=0.5),
]
RELEASES: list[Any] = [
    noisy_update,
    noisy_sum,
    *(lambda value, step=step: noisy_step(step, value) for step in STEPS),
]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("value", [0.0, 1 / 3, 0.7])
def test_every_noisy_value_is_possible_in_both_worlds(release: Any, value: float) -> None:
    """All releases lie on one grid that follows from the noise, however small they are."""
    found = release(value).double()
    assert float(found.std()) == pytest.approx(1.0, abs=0.15)
    assert torch.equal((found * 2**18).round() / 2**18, found)
    # the grid is used: noise is not on one of its own
    assert len(found.unique()) > 0.9 * min(ENTRIES, 2**18)


@pytest.mark.parametrize("std", [1e-300, 1e-30, 3e-6, 7.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_sum_is_right_at_every_size(std: float, dtype: torch.dtype) -> None:
    update = {"w": torch.tensor([0.0, 1.5, -3.0, torch.inf, torch.nan], dtype=dtype)}
    found = add_gaussian(update, std, stream(3))["w"]
    drawn = add_gaussian({"w": torch.zeros(5, dtype=torch.float64)}, std, stream(3))["w"]
    expected = (update["w"].double() + drawn).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5 * std, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_of_half_precision_does_not_overflow(dtype: torch.dtype) -> None:
    """Four times 30,000 is beyond what float16 holds; the mean that is shown is not."""
    updates = [
        Update(tensors={"w": torch.full((5000,), 30_000.0, dtype=dtype)}, num_examples=1)
        for _ in range(4)
    ]
    defense = DPFTRL(noise_multiplier=1e-3)
    asked = ServerRound(clients=4, sensitivity=1.0, stream=stream(1), before=None)
    shown = defense.add_noise(defense.combine(updates), asked).tensors["w"]
    value = float(updates[0].tensors["w"][0])
    assert float(shown.double().mean()) == pytest.approx(value, rel=1e-6)
    assert float(shown.double().std()) < 1, "a sum is rounded by less than a client moves it"
