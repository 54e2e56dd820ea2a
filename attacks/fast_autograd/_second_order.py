"""Layers whose gradient is cheap to differentiate once more, as gradient matching does.

An iteration of a gradient-matching attack computes g(x) = ∂L/∂θ, and then ∂<g(x), v>/∂x for a fixed
v. PyTorch's own second derivative of a convolution uses the output gradient as a kernel as large as
the image; here it costs four convolutions of the usual shapes, the count of Pearlmutter, Fast Exact
Multiplication by the Hessian, Neural Computation 1994. Results are PyTorch's, up to rounding.

The slopes of ReLU and of max pooling jump, and their derivative is zero almost everywhere: gradient
matching never learns that a neuron had better be on. In `smooth`, first derivatives stay what
they are; only the second derivative sees each jump as wide as `width`:

    ReLU:     d H(z) / dz        = σ'(z / width) / width           for the step H
    max pool: d onehot(z)_j / dz = d softmax(z / width)_j / dz

(surrogate derivatives: Neftci, Mostafa and Zenke, Surrogate Gradient Learning in Spiking Neural
Networks, 2019; here for the second derivative).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks.fast_autograd._convolution import (
    ConvolutionAlgorithm,
    ConvolutionShape,
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
"""Weights of the largest kernel from which closed forms are faster on a CPU core (measured between
LeNet's 3,600 and ConvNet's 73,728)."""


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
    return ConvolutionAlgorithm(problem)


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


def smooth(model: nn.Module, width: float | Tensor) -> None:
    """Gives the ReLUs and max pools of `model`, in place, smooth second derivatives.

    `width` is that of a smoothed jump, in units of the layers' inputs, which are about 1 after norm
    layers. It may be a 0-d tensor whose value is changed later. Max pools with dilation,
    `ceil_mode` or `return_indices` stay.
    """
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            replace_forward(module, partial(_smooth_relu, width=width))
        elif isinstance(module, nn.MaxPool2d):
            if module.dilation not in (1, (1, 1)) or module.ceil_mode or module.return_indices:
                continue
            replace_forward(module, partial(_smooth_max_pool, module, width=width))


def _smooth_relu(x: Tensor, *, width: float | Tensor) -> Tensor:
    """Computes max(x, 0), with a second derivative smoothed over about `width` around 0."""
    y: Tensor = _SmoothRelu.apply(x, width)
    return y


def _smooth_max_pool(module: nn.MaxPool2d, x: Tensor, *, width: float | Tensor) -> Tensor:
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
