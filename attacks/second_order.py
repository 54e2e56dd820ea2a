"""Layers whose gradient is cheap to differentiate once more, as gradient matching does.

An iteration of a gradient-matching attack computes g(x) = ∂L/∂θ, and then ∂<g(x), v>/∂x for a fixed
v. PyTorch's own second derivative of a convolution uses the output gradient as a kernel as large as
the image, and that of a normalization is a chain of some forty elementwise operations. Here a
convolution costs four convolutions of the usual shapes, the count of Pearlmutter, Fast Exact
Multiplication by the Hessian, Neural Computation 1994; a normalization costs five reductions and a
few passes. Results are PyTorch's, up to rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks import convolution
from fedsim_attacks.convolution import Geometry


def accelerate(model: nn.Module) -> None:
    """Make `model` fast for `gradient(..., create_graph=True)` differentiated once in the images.

    Its convolutions, batch norms and group norms get the formulas of this module. Names, parameters
    and buffers stay, but batch norm no longer updates its running statistics. Fit for that use
    only: the gradients of *leaf* parameters are computed only while a graph is being created.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if geometry := Geometry.of(module):
                module.forward = partial(_convolve, module, geometry)  # type: ignore[method-assign]
        elif isinstance(module, nn.BatchNorm2d):
            module.forward = partial(_batch_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.GroupNorm):
            module.forward = partial(_group_norm, module)  # type: ignore[method-assign]


def _wanted(parameter: Tensor | None) -> bool:
    # The second differentiation is in the images: a leaf's gradient would be thrown away. Weights
    # after a local step are no leaves, since they depend on the images.
    return parameter is not None and (torch.is_grad_enabled() or not parameter.is_leaf)


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
        wants = ctx.needs_input_grad[0], _wanted(w), _wanted(b)
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
        to_gy, to_x, to_w = None, None, None
        if vw is not None:
            to_gy = convolution.output(x, vw, vb, ctx.geometry)
            if ctx.needs_input_grad[1]:
                to_x = convolution.input_gradient(gy, x, vw, ctx.geometry)
        if vx is not None:
            moved = convolution.output(vx, w, None, ctx.geometry)
            to_gy = moved if to_gy is None else to_gy.add_(moved)
            if _wanted(w):
                to_w = convolution.weight_gradient(gy, vx, w, ctx.geometry)
        return to_gy, to_x, to_w, None, None
