"""Clip: the formula, the bound whatever happens, idempotence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.contracts.defense import global_norm
from fedsim.testing.cases import mixed, same, stream
from fedsim_defenses.clip import Clip

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def clipped(update: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
    return dict(Clip(norm=norm).apply(update, {}, stream())[0])


def test_the_formula() -> None:
    update = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0, 0.0]])}
    found = clipped(update, 2.5)
    torch.testing.assert_close(found["a"], torch.tensor([1.5]))
    torch.testing.assert_close(found["b"], torch.tensor([[2.0, 0.0]]))
    assert same(clipped(update, 5.0), update)


@settings(max_examples=60, deadline=None)
@given(
    norm=st.floats(1e-9, 1e9),
    scale=st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**20),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_the_bound_holds_after_rounding_and_clipping_twice_is_clipping_once(
    norm: float, scale: float, seed: int, size: int, dtype: torch.dtype
) -> None:
    update = {"a": (scale * torch.randn(size, generator=stream(seed))).to(dtype)}
    once = clipped(update, norm)
    assert float(global_norm(once)) <= norm
    assert same(clipped(once, norm), once)


def test_the_direction_is_kept_and_the_bound_is_reached() -> None:
    update = mixed()
    found = clipped(update, 0.5)
    ratio = found["double"] / update["double"]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-12, atol=0)
    assert float(global_norm(found)) == pytest.approx(0.5, rel=0.02)


def test_a_norm_beyond_single_precision_is_still_a_norm() -> None:
    found = clipped({"a": torch.full((4,), 1e30)}, 1.0)
    torch.testing.assert_close(found["a"], torch.full((4,), 0.5))
