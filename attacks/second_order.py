"""Layers whose gradient is cheap to differentiate once more, as gradient matching does.

An iteration of a gradient-matching attack computes g(x) = ∂L/∂θ, and then ∂<g(x), v>/∂x for a fixed
v. PyTorch's own second derivative of a convolution uses the output gradient as a kernel as large as
the image; here it costs four convolutions of the usual shapes, the count of Pearlmutter, Fast Exact
Multiplication by the Hessian, Neural Computation 1994. Results are PyTorch's, up to rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks import convolution
from fedsim_attacks.convolution import Geometry
from fedsim_attacks.normalization import batch_norm, group_norm
from fedsim_attacks.pruned import is_wanted, is_wanted_of_input

_WORTHWHILE = 16384
"""Weights of the largest kernel from which the closed forms are faster on a CPU core (measured
between LeNet's 3,600, where they take 1.7 times as long, and ConvNet's 73,728 at width 32)."""


def accelerate(model: nn.Module) -> None:
    """Make `model` fast for `gradient(..., create_graph=True)` differentiated once in the images.

    Its convolutions, batch norms and group norms get closed-form second derivatives. Names,
    parameters and buffers stay, but batch norm no longer updates its running statistics. Fit for
    that use only: gradients of leaf parameters are computed only while a graph is being created.
    A model of small kernels is left alone: there, calling Python costs more than it saves.
    """
    kernels = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d)]
    if max(kernels, default=0) < _WORTHWHILE:
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if geometry := Geometry.of(module):
                module.forward = partial(_convolve, module, geometry)  # type: ignore[method-assign]
        elif isinstance(module, nn.BatchNorm2d) and module.affine:
            module.forward = partial(batch_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.GroupNorm) and module.affine:
            module.forward = partial(group_norm, module)  # type: ignore[method-assign]


def drop_dead_weights(
    model: nn.Module, input_shape: tuple[int, int, int]
) -> dict[str, tuple[slice, ...]]:
    """Let the accelerated convolutions of `model` do without weights that only ever meet padding.

    On a map of one pixel that are eight ninths of a 3x3 kernel; their gradient is zero whatever the
    images. Returns the part that is left of each kernel that has any: for images (C, H, W) the
    model is from here on to be called with those parts as its parameters.
    """
    shapes: dict[nn.Conv2d, set[torch.Size]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, inputs: shapes.setdefault(module, set()).add(inputs[0].shape[2:])
        )
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and "forward" in vars(module)
    ]
    if not hooks:
        return {}
    like = next(model.parameters())
    with torch.no_grad():
        model.eval()(torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device))
    for hook in hooks:
        hook.remove()
    windows = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and len(shapes.get(module, ())) == 1:
            geometry, (size,) = Geometry.of(module), shapes[module]
            found = geometry and geometry.live_window(size, module.weight.shape[2:])
            if found:
                less, rows, columns = found
                module.forward = partial(_convolve, module, less)  # type: ignore[method-assign]
                windows[f"{name}.weight"] = (slice(None), slice(None), rows, columns)
    return windows


def _convolve(module: nn.Conv2d, geometry: Geometry, x: Tensor) -> Tensor:
    y: Tensor = _Convolution.apply(x, module.weight, module.bias, geometry)
    return y


class _Convolution(torch.autograd.Function):
    """y = x * w + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w, b)
        ctx.geometry = geometry
        return convolution.output(x, w, b, geometry)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b = ctx.saved_tensors
        wants = is_wanted_of_input(x), is_wanted(w), is_wanted(b)
        return *_ConvolutionGradient.apply(gy, x, w, ctx.geometry, wants), None


class _ConvolutionGradient(torch.autograd.Function):
    """(gx, gw, gb) of the convolution, as a function of (gy, x, w)."""

    @staticmethod
    def forward(
        ctx: Any, gy: Tensor, x: Tensor, w: Tensor, geometry: Geometry, wants: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(gy, x, w)
        ctx.set_materialize_grads(False)
        ctx.geometry = geometry
        return (
            convolution.input_gradient(gy, x, w, geometry) if wants[0] else None,
            convolution.weight_gradient(gy, x, w, geometry) if wants[1] else None,
            gy.sum((0, 2, 3)) if wants[2] else None,
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gy, x, w = ctx.saved_tensors
        to_gy = None if vb is None else vb.view(1, -1, 1, 1).expand_as(gy)
        to_x, to_w = None, None
        if vw is not None:
            to_gy = convolution.output(x, vw, vb, ctx.geometry)
            if ctx.needs_input_grad[1]:
                to_x = convolution.input_gradient(gy, x, vw, ctx.geometry)
        if vx is not None:
            moved = convolution.output(vx, w, None, ctx.geometry)
            to_gy = moved if to_gy is None else moved.add_(to_gy)
            if is_wanted(w):
                to_w = convolution.weight_gradient(gy, vx, w, ctx.geometry)
        return to_gy, to_x, to_w, None, None
