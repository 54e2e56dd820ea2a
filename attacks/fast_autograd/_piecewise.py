"""ReLU and max pooling: linear almost everywhere, so that only their slopes are differentiated.

PyTorch gives both second derivatives in their input too, which are zeros: as large as the layer,
and added to it in every iteration of a gradient-matching attack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    y: Tensor = _Relu.apply(x)
    return y


def max_pool(module: nn.MaxPool2d, x: Tensor) -> Tensor:
    """`module(x)` for x (N, C, H, W) and a module that returns no indices."""
    pool = _Pool(
        kernel=_sides(module.kernel_size),
        stride=_sides(module.stride),
        padding=_sides(module.padding),
        dilation=_sides(module.dilation),
        ceil=module.ceil_mode,
    )
    y: Tensor = _MaxPool.apply(x, pool)
    return y


def _sides(size: int | tuple[int, ...]) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


class _Pool(NamedTuple):
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil: bool


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp_min(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        gx: Tensor = _ReluGradient.apply(gy, y.detach())
        return gx


class _ReluGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gy: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gx: Tensor = _aten.threshold_backward(gy, y, 0)
        return gx

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return _aten.threshold_backward(vx, y, 0), None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: _Pool) -> Tensor:
        y: Tensor
        y, indices = _aten.max_pool2d_with_indices(x, *pool)
        ctx.save_for_backward(x, indices)
        ctx.pool = pool
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        x, indices = ctx.saved_tensors
        return _MaxPoolGradient.apply(gy, x.detach(), indices, ctx.pool), None


class _MaxPoolGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, indices: Tensor, pool: _Pool) -> Tensor:
        ctx.save_for_backward(indices)
        gx: Tensor = _aten.max_pool2d_with_indices_backward(gy, x, *pool, indices)
        return gx

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return vx.flatten(2).gather(2, indices.flatten(2)).view(indices.shape), None, None, None
