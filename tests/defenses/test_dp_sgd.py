"""DPSGD: per-example clipping, its noise, its memory, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fedsim_defenses.per_example as module
from fedsim.contracts.defense import global_norm
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.models.base import Classifier
from fedsim.models.local import LossFn, gradient, loss_function
from fedsim.models.mlp import MLP
from fedsim.models.resnet import ResNet18
from fedsim.testing.cases import local_step, stream
from fedsim.types import FedsimError, LocalTraining, Sampling, Tensors
from fedsim_defenses.dp_sgd import DPSGD

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=6, lr=0.1)
HUGE = 1e12

Batch = tuple[Tensor, Tensor]


def setup(
    model: Classifier, training: LocalTraining = DECLARED
) -> tuple[LossFn, dict[str, Tensor]]:
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    return loss_function(model, buffers, training), parameters


def batch(count: int = 6, size: int = 4, scale: float = 1.0) -> Batch:
    draw = stream(5)
    images = scale * torch.randn(count, 1, size, size, generator=draw)
    return images, torch.randint(3, (count,), generator=draw)


def mlp() -> Classifier:
    torch.manual_seed(0)
    return MLP().build((1, 4, 4), 3)


def step(defense: DPSGD, loss: LossFn, at: Tensors, data: Batch, seed: int = 1) -> Tensors:
    return defense.gradient(local_step(loss, _never, len(data[0])))(at, *data, stream(seed))


def _never(*_: object) -> Tensors:
    raise AssertionError("dp_sgd computes gradients of its own")


@pytest.mark.parametrize("size", [4, 8])
def test_without_noise_and_bound_it_is_the_plain_gradient(size: int) -> None:
    residual = ResNet18(norm="group", width=4)
    loss, at = setup(mlp() if size == 4 else residual.build((1, size, size), 3))
    data = batch(size=size)
    found = step(DPSGD(norm=HUGE, noise_multiplier=0), loss, at, data)
    expected = gradient(loss, at, *data)
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-6)


def test_the_mean_of_clipped_gradients_computed_one_by_one() -> None:
    loss, at = setup(mlp())
    images, labels = batch(scale=3.0)
    norm = 10.0
    expected = {name: torch.zeros_like(value) for name, value in at.items()}
    norms = []
    for i in range(len(images)):
        own = gradient(loss, at, images[i : i + 1], labels[i : i + 1])
        norms.append(float(global_norm(own)))
        for name, value in own.items():
            expected[name] += value / max(1, norms[-1] / norm) / len(images)
    assert min(norms) < norm < max(norms), "the bound must cut some examples and not others"
    found = step(DPSGD(norm=norm, noise_multiplier=0), loss, at, (images, labels))
    torch.testing.assert_close(dict(found), expected, rtol=1e-4, atol=1e-6)


def test_rounding_does_not_lift_a_long_gradient_above_the_bound() -> None:
    """A float32 norm of so many equal entries is a third of a percent short."""
    gradient = {"weight": torch.full((1, 1 << 23), 0.37), "bias": torch.full((1, 1000), 5.0)}
    clipped = module._clipped_sum(gradient, 1.0)
    assert 1 - 1e-5 < float(global_norm(clipped)) <= 1


def test_the_measured_deviation_is_z_norm_over_the_batch_size() -> None:
    at = {"a": torch.zeros(60_000)}
    data = torch.zeros(8, 1, 1, 1), torch.zeros(8, dtype=torch.int64)
    found = step(DPSGD(norm=2.0, noise_multiplier=1.3), lambda p, *_: p["a"].sum() * 0, at, data)
    # 60,000 draws: the standard error is 0.29%
    assert float(found["a"].std()) == pytest.approx(1.3 * 2.0 / 8, rel=0.012)
    assert abs(float(found["a"].mean())) < 0.02


def test_a_non_finite_example_counts_as_zero() -> None:
    loss, at = setup(mlp())
    images, labels = batch(count=4)
    defense = DPSGD(norm=0.5, noise_multiplier=0)
    for value in (math.nan, math.inf):
        spoiled = images.clone()
        spoiled[2] = value
        found = step(defense, loss, at, (spoiled, labels))
        keep = torch.tensor([0, 1, 3])
        rest = step(defense, loss, at, (images[keep], labels[keep]))
        for name in at:
            torch.testing.assert_close(found[name], rest[name] * 3 / 4)


def test_batch_norm_in_train_mode_is_refused_with_the_remedy() -> None:
    loss, at = setup(ResNet18(width=4).build((1, 8, 8), 3))
    with pytest.raises(FedsimError, match="norm: group"):
        step(DPSGD(norm=1.0, noise_multiplier=1.0), loss, at, batch(size=8))


FIVE = {"algorithm": "fedavg", "steps": 5}


@pytest.mark.parametrize(
    ("changes", "releases", "sampling"),
    [
        ({}, 1, "without_replacement"),
        (FIVE, 5, "without_replacement"),
        ({**FIVE, "batches": "same"}, 5, None),
        ({**FIVE, "steps": 1, "batches": "same"}, 1, "without_replacement"),
        ({"sampling": "poisson"}, 1, "poisson"),
        ({**FIVE, "sampling": "balls_in_bins"}, 5, "balls_in_bins"),
    ],
)
def test_what_it_proves(
    changes: dict[str, object], releases: int, sampling: Sampling | None
) -> None:
    fields = {"algorithm": "fedsgd", "steps": 1, "batch_size": 4, "lr": 0.1, **changes}
    training = LocalTraining(**fields)  # type: ignore[arg-type]
    held = DPSGD(norm=3.0, noise_multiplier=1.1).guarantee(Guarantee(), training)
    assert held.sensitivity == math.inf
    assert held.mechanism == Mechanism(
        noise_multiplier=1.1,
        unit="example",
        relation="zero_out" if sampling in ("poisson", "balls_in_bins") else "replace_one",
        releases=releases,
        sampling=sampling,
    )
