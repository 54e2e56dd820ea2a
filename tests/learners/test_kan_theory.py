"""The KAN paper's setting in `benchmarks/kan_theory.py`: the product's model, and its laws."""

from __future__ import annotations

import kan_theory as theory
import pytest
import torch
from torch import Tensor

from fedsim.models.kan import KAN
from fedsim.testing.cases import stream


@pytest.fixture(scope="module")
def network() -> theory.Network:
    return theory.Network(6, stream(0))


@pytest.fixture(scope="module")
def data(network: theory.Network) -> tuple[Tensor, Tensor]:
    x, labels = theory.points(30, stream(1))
    return network.spread(x), labels


def test_it_is_the_products_model_with_the_difference_of_two_logits() -> None:
    """With `train: first`; the product squashes its inputs, so that they are given unsquashed."""
    shape = {"hidden": 6, "degree": theory.DEGREE, "intervals": theory.INTERVALS}
    model = KAN.model_validate({**shape, "train": "first"}).build((theory.DIMENSION,), 2).double()
    network = theory.Network(6, stream(0))
    (weight,) = model.parameters()
    network.first = weight.detach().clone()
    output = torch.eye(6 * network.second.shape[1], dtype=torch.float64)
    second = model.head(output)
    network.second = (second[:, 1] - second[:, 0]).detach().reshape(6, -1)
    x, _ = theory.points(5, stream(1))
    logits = model(torch.atanh(x))
    f = logits[:, 1] - logits[:, 0]
    values, slope = network.slopes(network.first, network.spread(x))
    torch.testing.assert_close(values, f.detach())
    (expected,) = torch.autograd.grad(f[3], weight)
    torch.testing.assert_close(torch.outer(slope[3], network.spread(x)[3]), expected)


def test_the_margin_is_attained_and_no_direction_has_more(
    network: theory.Network, data: tuple[Tensor, Tensor]
) -> None:
    proven, most = theory.margin(network, *data)
    assert 0 < proven <= most * (1 + 1e-9)
    assert proven == pytest.approx(most, rel=1e-3)
    _, slope = network.slopes(network.first, data[0])
    features = data[1][:, None] * torch.einsum("nk,nd->nkd", slope, data[0]).flatten(1)
    means = features.mean(0)
    for direction in (means, *torch.randn(50, features.shape[1], generator=stream(2)).double()):
        assert float((features @ direction).min() / direction.norm()) <= most


def test_no_gradient_is_longer_than_the_bound(
    network: theory.Network, data: tuple[Tensor, Tensor]
) -> None:
    bound = network.gradient_bound()
    for scale in (0.5, 1.0, 3.0, 10.0):
        weights = scale * torch.randn(network.first.shape, generator=stream(3), dtype=torch.float64)
        _, slope = network.slopes(weights, data[0])
        assert float((slope.norm(dim=1) * data[0].norm(dim=1)).max()) <= bound


def test_a_run_without_clip_or_ball_is_plain_descent_and_both_hold_it_when_active() -> None:
    free = theory.measure(theory.Arm("plain", n=64, width=4, rate=2.0, clip=1e9), 0)
    assert free["clipped"] == free["projected"] == 0
    assert float(str(free["longest_gradient"])) <= float(str(free["gradient_bound"]))
    held = theory.measure(theory.Arm("held", n=64, width=4, rate=2.0, noise=3.0, radius=0.5), 0)
    assert float(str(held["farthest"])) <= 0.5 and float(str(held["projected"])) > 0.5
    tight = theory.measure(theory.Arm("tight", n=64, width=4, rate=2.0, clip=0.01), 0)
    assert float(str(tight["clipped"])) > 0.5
    assert float(str(tight["farthest"])) < float(str(free["farthest"]))
