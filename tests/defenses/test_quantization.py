"""Quantization: levels, error bounds, unbiasedness."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.testing.cases import same, stream
from fedsim_defenses.quantization import Quantization


def quantized(tensor: Tensor, seed: int = 1, **parameters: object) -> Tensor:
    return Quantization(**parameters).apply({"a": tensor}, {}, stream(seed))[0]["a"]


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 16),
    rounding=st.sampled_from(["deterministic", "stochastic"]),
    scale=st.floats(1e-30, 1e30),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_error_is_bounded_and_the_levels_are_few(
    bits: int, rounding: str, scale: float, seed: int, dtype: torch.dtype
) -> None:
    tensor = scale * torch.randn(200, generator=stream(seed), dtype=dtype)
    found = quantized(tensor, bits=bits, rounding=rounding).double()
    spacing = float(tensor.abs().max()) / (2 ** (bits - 1) - 1)
    slack = 1e-6 * float(tensor.abs().max())  # float32's own rounding
    error = (found - tensor.double()).abs().max()
    assert float(error) <= (spacing / 2 if rounding == "deterministic" else spacing) + slack
    assert found.unique().numel() <= 2**bits - 1
    assert float(found.abs().max()) <= float(tensor.abs().max()) + slack


def test_stochastic_rounding_is_unbiased_and_nearest_rounding_is_not() -> None:
    tensor = torch.tensor([1.0, 0.26, -0.26, 0.5, -0.9]).repeat(40_000, 1)
    found = quantized(tensor, bits=2)  # levels -1, 0, 1
    # the mean of 40,000 draws of deviation at most 1/2 has a standard error of at most 0.0025
    torch.testing.assert_close(found.mean(0), tensor[0], rtol=0, atol=0.0125)
    assert sorted(found.unique().tolist()) == [-1.0, 0.0, 1.0]
    nearest = quantized(tensor, bits=2, rounding="deterministic")
    assert nearest[0].tolist() == [1.0, 0.0, 0.0, 0.0, -1.0]


def test_the_largest_entry_survives() -> None:
    tensor = torch.tensor([0.3, -7.7, 0.0])
    for seed in range(20):
        assert float(quantized(tensor, seed, bits=4)[1]) == pytest.approx(-7.7)
        assert float(quantized(tensor, seed, bits=4)[2]) == 0.0


def test_each_tensor_has_its_own_scale() -> None:
    update = {"small": torch.tensor([1e-3, 5e-4]), "large": torch.tensor([1e3])}
    found, _ = Quantization(bits=8, rounding="deterministic").apply(update, {}, stream())
    torch.testing.assert_close(found["small"], update["small"], rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3),
        torch.zeros(0, 2),
        torch.tensor([1.0, math.nan]),
        torch.tensor([1.0, -math.inf]),
    ],
)
def test_empty_zero_and_non_finite_tensors_pass_unchanged(tensor: Tensor) -> None:
    assert same({"a": quantized(tensor, bits=3)}, {"a": tensor})


def test_the_smallest_single_precision_numbers_do_not_divide_by_zero() -> None:
    tensor = torch.tensor([1.4e-45, 0.0])
    assert same({"a": quantized(tensor, bits=16)}, {"a": tensor})
