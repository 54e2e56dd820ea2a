"""Packing symmetric matrices: an isometry, and its inverse."""

from __future__ import annotations

import pytest
import torch

from fedsim import rng
from fedsim_attacks.closed_form._quadratic_form import pack, unpack


def _symmetric(count: int, size: int) -> torch.Tensor:
    stream = rng.generator(0, "symmetric")
    square = torch.randn(count, size, size, dtype=torch.float64, generator=stream)
    return square + square.transpose(1, 2)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_inner_products_are_kept(size: int) -> None:
    matrices = _symmetric(4, size)
    packed = pack(matrices)
    assert packed.shape == (4, size * (size + 1) // 2)
    flat = matrices.flatten(1)
    torch.testing.assert_close(packed @ packed.T, flat @ flat.T, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_unpack_is_the_inverse(size: int) -> None:
    matrices = _symmetric(4, size)
    torch.testing.assert_close(unpack(pack(matrices), size), matrices, rtol=1e-15, atol=1e-15)
