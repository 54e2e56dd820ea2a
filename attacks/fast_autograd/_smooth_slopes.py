"""Slopes that jump, differentiated as if they did not.

A gradient is made of the slopes of ReLU and of max pooling, which jump where an input changes sign
or another one becomes the largest. Almost everywhere their derivative is zero, so that gradient
matching never learns that a neuron had better be on: it descends within one linear piece of the
network, and is stuck where that ends. Here values and first derivatives stay what they are, and so
does the objective; only its own derivative sees each jump as wide as `width`:

    ReLU:     d H(z) / dz        = σ'(z / width) / width           for the step H
    max pool: d onehot(z)_j / dz = d softmax(z / width)_j / dz

(surrogate derivatives: Neftci, Mostafa and Zenke, Surrogate Gradient Learning in Spiking Neural
Networks, 2019; here for the second derivative).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim_attacks.fast_autograd._second_order import replace_forward


def smooth(model: nn.Module, width: float | Tensor) -> None:
    """Gives the ReLUs and max pools of `model`, in place, smooth second derivatives.

    `width` is that of a smoothed jump, in units of the layers' inputs, which are about 1 after norm
    layers. It may be a 0-d tensor whose value is changed later.
    """
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            replace_forward(module, partial(relu, width=width))
        elif isinstance(module, nn.MaxPool2d):
            if module.dilation not in (1, (1, 1)) or module.ceil_mode or module.return_indices:
                continue
            replace_forward(module, partial(max_pool, module, width=width))


def relu(x: Tensor, *, width: float | Tensor) -> Tensor:
    """Computes max(x, 0), with a second derivative smoothed over about `width` around 0."""
    y: Tensor = _SmoothRelu.apply(x, width)
    return y


def max_pool(module: nn.MaxPool2d, x: Tensor, *, width: float | Tensor) -> Tensor:
    """Computes `module(x)` for x (N, C, H, W), with a smoothed second derivative."""
    # Padding by -∞ never wins a maximum.
    windows, shape = _windows(module, x, -torch.inf)
    y: Tensor = _Largest.apply(windows, width)
    return y.view(shape)


def _windows(module: nn.MaxPool2d, x: Tensor, fill: float) -> tuple[Tensor, tuple[int, ...]]:
    """Lists what each output sees, (N C, k l, H' W'), and the output's shape (N, C, H', W')."""
    k, s, p = (
        (size, size) if isinstance(size, int) else tuple(size)
        for size in (module.kernel_size, module.stride, module.padding)
    )
    # `F.unfold` pads by zeros only, so that padding is done before.
    if any(p):
        x = F.pad(x, (p[1], p[1], p[0], p[0]), value=fill)
    n, c, height, width = x.shape
    h, w = (height - k[0]) // s[0] + 1, (width - k[1]) // s[1] + 1
    if s == k:  # windows do not overlap: a view and one copy
        x = x[:, :, : h * k[0], : w * k[1]].reshape(n * c, h, k[0], w, k[1])
        return x.permute(0, 2, 4, 1, 3).reshape(n * c, k[0] * k[1], h * w), (n, c, h, w)
    x = x.reshape(n * c, 1, height, width)
    return F.unfold(x, k, stride=s), (n, c, h, w)


class _SmoothRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: float | Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.width = width
        return x.clamp_min(0)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        # The slope is a function of its own, to which a derivative can be given.
        return gy * _Step.apply(x, ctx.width), None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: float | Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.width = width
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x / ctx.width)
        return gy * share * (1 - share) / ctx.width, None


class _Largest(torch.autograd.Function):
    """The largest of each window: (n, k, p) -> (n, p)."""

    @staticmethod
    def forward(ctx: Any, windows: Tensor, width: float | Tensor) -> Tensor:
        largest, indices = windows.max(1, keepdim=True)
        # Searched for once: both differentiations of a gradient ask for them.
        ctx.save_for_backward(windows, indices)
        ctx.width = width
        return largest.squeeze(1)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        windows, indices = ctx.saved_tensors
        return gy[:, None] * _OneHot.apply(windows, indices, ctx.width), None


class _OneHot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, windows: Tensor, indices: Tensor, width: float | Tensor) -> Tensor:
        ctx.save_for_backward(windows)
        ctx.width = width
        return torch.zeros_like(windows).scatter_(1, indices, 1.0)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        (windows,) = ctx.saved_tensors
        share = (windows / ctx.width).softmax(1)
        slope = share * (gy - (gy * share).sum(1, keepdim=True)) / ctx.width
        return slope, None, None
