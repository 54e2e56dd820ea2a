"""Layers whose gradient is cheap to differentiate once more, as gradient matching does.

An iteration of a gradient-matching attack computes g(x) = ∂L/∂θ, and then ∂<g(x), v>/∂x for a fixed
v. PyTorch's own second derivative of a convolution uses the output gradient as a kernel as large as
the image; here it costs four convolutions of the usual shapes, the count of Pearlmutter, Fast Exact
Multiplication by the Hessian, Neural Computation 1994. Results are PyTorch's, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks.fast_autograd._convolution import (
    ConvolutionAlgorithm,
    ConvolutionShape,
    Direct,
    Geometry,
    Patches,
    Winograd,
)
from fedsim_attacks.fast_autograd._layers import (
    batch_norm,
    group_norm,
    is_wanted,
    is_wanted_of_input,
    max_pool,
    relu,
)


def replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Makes `module` compute `forward` of its input; its parameters and buffers stay."""
    module.forward = forward


_WORTHWHILE = 16384
"""Weights of the largest kernel from which the closed forms are faster on a CPU core (measured
between LeNet's 3,600, where they take 1.7 times as long, and ConvNet's 73,728 at width 32)."""


def accelerate(model: nn.Module) -> None:
    """Speeds up `model`, in place, for gradients that are differentiated again in the images.

    Names, parameters and buffers stay. Use the model for nothing else: it computes gradients of
    leaf parameters only while a graph is created, and updates no running statistics.
    """
    kernels = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d)]
    if max(kernels, default=0) < _WORTHWHILE:
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            if geometry := Geometry.read(module):
                replace_forward(module, _FastConvolution(module, geometry))
        elif isinstance(module, nn.BatchNorm2d) and module.affine:
            replace_forward(module, partial(batch_norm, module))
        elif isinstance(module, nn.GroupNorm) and module.affine:
            replace_forward(module, partial(group_norm, module))
        elif isinstance(module, nn.ReLU):
            replace_forward(module, relu)
        elif isinstance(module, nn.MaxPool2d) and not module.return_indices:
            replace_forward(module, partial(max_pool, module))


def drop_dead_weights(
    model: nn.Module, input_shape: tuple[int, ...]
) -> dict[str, tuple[slice, ...]]:
    """Frees convolutions of an accelerated `model` from weights that only meet padding.

    Returns by name of a parameter the slices of the part that the model must be called with from
    then on. The model is left in eval mode; `input_shape` is (C, H, W).
    """
    shapes: dict[nn.Conv2d, set[torch.Size]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda module, inputs: shapes.setdefault(module, set()).add(inputs[0].shape[2:])
        )
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and "forward" in vars(module)
    ]
    # Only accelerated layers can move a smaller kernel as the whole one moved.
    if not hooks:
        return {}
    like = next(model.parameters())
    with torch.no_grad():
        model.eval()(torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device))
    for hook in hooks:
        hook.remove()
    windows: dict[str, tuple[slice, ...]] = {}
    for name, module in model.named_modules():
        # A layer that met two sizes has no one window.
        if isinstance(module, nn.Conv2d) and len(shapes.get(module, ())) == 1:
            geometry, (size,) = Geometry.read(module), shapes[module]
            found = geometry and geometry.live_window(size, module.weight.shape[2:])
            if found:
                less, rows, columns = found
                replace_forward(module, _FastConvolution(module, less))
                windows[f"{name}.weight"] = (slice(None), slice(None), rows, columns)
    return windows


class _FastConvolution:
    """The forward function of an accelerated convolution."""

    def __init__(self, module: nn.Conv2d, geometry: Geometry) -> None:
        self._module, self._geometry = module, geometry
        self._form: tuple[ConvolutionAlgorithm, Tensor, int, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        w, b = self._module.weight, self._module.bias
        algorithm = _fastest(ConvolutionShape(x.shape, w.shape, self._geometry), x.device.type)
        y: Tensor = _Convolution.apply(
            x, w, b, self._weights(algorithm, w.detach(), w.is_leaf), algorithm
        )
        return y

    def _weights(self, algorithm: ConvolutionAlgorithm, w: Tensor, fixed: bool) -> Tensor:
        """Brings weights into the algorithm's form, once if they stay over all iterations."""
        # Weights after a local step depend on the images: they are new in each iteration.
        if not fixed:
            return algorithm.weights(w)
        if self._form is not None:
            of, source, version, form = self._form  # `source` keeps its memory from being reused
            if of is algorithm and source.data_ptr() == w.data_ptr() and version == w._version:
                return form
        self._form = algorithm, w, w._version, algorithm.weights(w)
        return self._form[-1]


@lru_cache(maxsize=256)
def _fastest(problem: ConvolutionShape, device: str) -> ConvolutionAlgorithm:
    if device == "cpu":  # accelerators' own kernels choose among algorithms like these
        if Patches.pays(problem):
            return Patches(problem)
        if Winograd.applies(problem) and Winograd.pays(problem):
            return Winograd(problem)
    return Direct(problem)


class _Convolution(torch.autograd.Function):
    """y = x * w + b; `weights` are w in the algorithm's form."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        weights: Tensor,
        algorithm: ConvolutionAlgorithm,
    ) -> Tensor:
        images = algorithm.images(x)
        ctx.save_for_backward(x, w, b, images, weights)
        ctx.algorithm = algorithm
        return algorithm.output(images, weights, b)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, images, weights = ctx.saved_tensors
        wants = is_wanted_of_input(x), is_wanted(w), is_wanted(b)
        given = gy, x, w, images, weights, ctx.algorithm, wants
        return *_ConvolutionGradient.apply(*given), None, None


class _ConvolutionGradient(torch.autograd.Function):
    """(gx, gw, gb) of the convolution, as a function of (gy, x, w); x and w in both forms."""

    @staticmethod
    def forward(
        ctx: Any,
        gy: Tensor,
        x: Tensor,
        w: Tensor,
        images: Tensor,
        weights: Tensor,
        algorithm: ConvolutionAlgorithm,
        wants: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        gradients = algorithm.gradients(gy)
        ctx.save_for_backward(gy, w, images, weights, gradients)
        # Cotangents that are absent stay None, and their products are never taken.
        ctx.set_materialize_grads(False)
        ctx.algorithm = algorithm
        return (
            algorithm.input_gradient(gradients, images, weights) if wants[0] else None,
            algorithm.weight_gradient(gradients, images, weights) if wants[1] else None,
            gy.sum((0, 2, 3)) if wants[2] else None,
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gy, w, images, weights, gradients = ctx.saved_tensors
        algorithm: ConvolutionAlgorithm = ctx.algorithm
        # <vb, gb> with gb = Σ gy: its slope in gy is vb at every position.
        to_gy = None if vb is None else vb.view(1, -1, 1, 1).expand_as(gy)
        to_x, to_w = None, None
        if vw is not None:
            toward = algorithm.weights(vw, keep=False)
            # <vw, gw> is bilinear in gy and x: its slopes are the products of a convolution by vw.
            to_gy = algorithm.output(images, toward, vb)
            if ctx.needs_input_grad[1]:
                to_x = algorithm.input_gradient(gradients, images, toward)
        if vx is not None:
            toward = algorithm.images(vx)
            # <vx, gx> is bilinear in gy and w; in x it has no slope.
            moved = algorithm.output(toward, weights)
            to_gy = moved if to_gy is None else moved.add_(to_gy)
            if is_wanted(w):
                to_w = algorithm.weight_gradient(gradients, toward, weights)
        return to_gy, to_x, to_w, *(None,) * 4
