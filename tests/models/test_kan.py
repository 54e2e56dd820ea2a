"""The KAN and its spline basis, against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch import Tensor

from fedsim.models.base import Classifier, build
from fedsim.models.kan import basis_size, spline_basis
from fedsim.types import ModelSpec

DEGREES = [1, 2, 3, 5]


def reference(x: np.ndarray, degree: int, intervals: int, derivative: int = 0) -> np.ndarray:
    """(n, functions) by scipy."""
    knots = -1 + 2 / intervals * np.arange(-degree, intervals + degree + 1)
    columns = []
    for index in range(intervals + degree):
        spline = BSpline.basis_element(knots[index : index + degree + 2], extrapolate=False)
        spline = spline.derivative(derivative) if derivative else spline
        columns.append(np.nan_to_num(spline(x)))
    return np.stack(columns, axis=-1)


def inside(count: int = 400) -> Tensor:
    return torch.linspace(-1, 1, count + 1, dtype=torch.float64)[:-1] + 1 / count


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("intervals", [1, 4, 7])
def test_the_basis_is_scipys(degree: int, intervals: int) -> None:
    x = inside()
    basis = spline_basis(x, degree, intervals)
    assert basis.shape == (len(x), basis_size(degree, intervals))
    np.testing.assert_allclose(basis, reference(x.numpy(), degree, intervals), atol=1e-13)


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_derivatives_are_scipys(degree: int) -> None:
    x = inside().requires_grad_()
    basis = spline_basis(x, degree, 6)
    for index in range(basis.shape[1]):
        (first,) = torch.autograd.grad(basis[:, index].sum(), x, create_graph=True)
        expected = reference(x.detach().numpy(), degree, 6, 1)[:, index]
        np.testing.assert_allclose(first.detach(), expected, atol=1e-11)
        if degree > 2:
            (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
            expected = reference(x.detach().numpy(), degree, 6, 2)[:, index]
            np.testing.assert_allclose(second, expected, atol=1e-10)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_partition_of_unity_up_to_both_ends(degree: int, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([-1.0, 1.0])]).to(dtype)
    basis = spline_basis(x, degree, 5)
    assert bool((basis >= -1e-6).all())
    torch.testing.assert_close(basis.sum(-1), torch.ones_like(x))
    torch.testing.assert_close(basis.flip(-1), spline_basis(-x, degree, 5), atol=2e-6, rtol=1e-4)


def model(seed: int = 0, **parameters: object) -> Classifier:
    spec = ModelSpec(
        name="kan",
        parameters={"hidden": 5, **parameters},
        input_shape=(1, 3, 3),
        num_classes=3,
        mean=(0.5,),
        std=(0.5,),
    )
    return build(spec, seed=seed)


def test_it_is_the_formula() -> None:
    kan = model(degree=4, intervals=3)
    images = 3 * torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    w, c = kan.body[3].weight, kan.head.output.weight  # type: ignore[index, union-attr]
    x = torch.tanh(images.flatten(1))
    hidden = torch.tanh(
        torch.einsum("bip,kip->bk", spline_basis(x, 4, 3), w.view(5, 9, 7)) / math.sqrt(9)
    )
    expected = torch.einsum("bkp,ckp->bc", spline_basis(hidden, 4, 3), c.view(3, 5, 7))
    torch.testing.assert_close(kan(images), expected / math.sqrt(5))


def test_training_the_first_layer_leaves_the_second_as_it_is_for_everybody() -> None:
    fixed = model(train="first")
    assert [name for name, _ in fixed.named_parameters()] == ["body.3.weight"]
    assert not list(fixed.named_buffers())
    images = torch.randn(2, 1, 3, 3)
    other = model(seed=1, train="first")
    assert not torch.equal(fixed(images), other(images))
    other.load_state_dict(fixed.state_dict())
    assert torch.equal(fixed(images), other(images))
    reseeded = model(train="first", second_layer_seed=1)
    assert not torch.equal(fixed(images), reseeded(images))
