"""Norms, ReLU and max pooling with second derivatives in closed form, and which are wanted.

Notation of norms: x̂ = (x - μ) r with r = 1/σ over a *group* of elements that share statistics
(batch norm: a channel; group norm: the channels of one image that belong together), y = γ x̂ + β
with γ and β per channel; m is the mean over a group, Σ the sum over a channel. For gy = ∂L/∂y and
g = γ gy:

    gx = r (g - m(g) - x̂ m(g x̂))        gγ = Σ gy x̂        gβ = Σ gy

With fixed statistics (batch norm in eval mode) gx = r g. The second derivative is that of
s = <vx, gx> + <vγ, gγ> + <vβ, gβ> in gy, x and γ. PyTorch's own is a chain of some forty
elementwise operations; this one takes five reductions and a few passes.

ReLU and max pooling are linear almost everywhere. PyTorch gives both second derivatives in their
input too, which are zeros as large as the layer, added to it in every iteration.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def is_wanted_of_input(images: Tensor) -> bool:
    """Says whether anything will read a layer's gradient in its input `images`."""
    # The first differentiation is in the parameters, and does not need that gradient.
    return images.requires_grad and not (images.is_leaf and torch.is_grad_enabled())


def is_wanted(parameter: Tensor | None) -> bool:
    """Says whether anything will read the gradient of `parameter`; False of None."""
    # The second differentiation is in the images: the gradient of a leaf would be thrown away.
    # Weights after a local step are no leaves, they depend on the images.
    return parameter is not None and (torch.is_grad_enabled() or not parameter.is_leaf)


def _match_layout(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns `tensor` (N, C, H, W) in the memory order of `like`, copied if that differs."""
    # PyTorch's kernels up to 2.11 assume that both have the same order.
    last = like.device.type == "cpu" and like.is_contiguous(memory_format=torch.channels_last)
    last = last and not like.is_contiguous()
    return tensor.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


_aten = torch.ops.aten


def batch_norm(module: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Computes `module(x)` for x (N, C, H, W), without updating running statistics."""
    fixed = None
    if not module.training and module.running_mean is not None and module.running_var is not None:
        fixed = (module.running_mean, module.running_var)
    # `F.batch_norm` refuses this, the native operation does not.
    elif x.numel() == x.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    return _normalize(x, module.weight, module.bias, _NormOptions(None, module.eps, fixed))


def group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """Computes `module(x)` for x (N, C, H, W), with a closed-form second derivative."""
    return _normalize(
        x, module.weight, module.bias, _NormOptions(module.num_groups, module.eps, None)
    )


class _NormOptions(NamedTuple):
    groups: int | None  # number of groups per image; None is batch norm
    eps: float
    fixed: tuple[Tensor, Tensor] | None  # mean and variance (C,) that do not depend on x

    def local(self, x: Tensor) -> Tensor:
        """Sums x (N, C, H, W) over each channel, and for batch norm over the images."""
        return x.sum((0, 2, 3) if self.groups is None else (2, 3), keepdim=True)

    def group(self, local: Tensor) -> Tensor:
        """Sums local sums (..., C, 1, 1) over each group, and repeats it at its channels."""
        if self.groups is None:
            return local
        parts = torch.unflatten(local, -3, (self.groups, -1))
        return parts.sum(-3, keepdim=True).expand_as(parts).flatten(-4, -3)

    def spread(self, statistic: Tensor, channels: int) -> Tensor:
        """Repeats each group's statistic at its channels, in the shape that `local` returns."""
        if self.groups is None:
            return statistic.view(1, -1, 1, 1)
        each = statistic.view(-1, self.groups, 1).expand(-1, -1, channels // self.groups)
        return each.reshape(-1, channels, 1, 1)

    def channel(self, local: Tensor) -> Tensor:
        """Sums local sums over the images: (C,)."""
        return (local if self.groups is None else local.sum(0)).flatten()


def _normalize(x: Tensor, gamma: Tensor, beta: Tensor, layer: _NormOptions) -> Tensor:
    y: Tensor = _Normalization.apply(_match_layout(x, x), gamma, beta, layer)
    return y


class _Normalization(torch.autograd.Function):
    """y = γ x̂ + β."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, layer: _NormOptions) -> Tensor:
        y: Tensor
        if layer.groups is None:
            fixed = layer.fixed or (None, None)
            y, mean, r = _aten.native_batch_norm(
                x, gamma, beta, *fixed, layer.fixed is None, 0.0, layer.eps
            )
            if layer.fixed is not None:
                # ATen saves no statistics of a batch that was normalized by given ones.
                mean, r = layer.fixed[0], (layer.fixed[1] + layer.eps).rsqrt()
        else:
            n, c, h, w = x.shape
            y, mean, r = _aten.native_group_norm(
                x, gamma, beta, n, c, h * w, layer.groups, layer.eps
            )
        ctx.save_for_backward(x, gamma, beta, mean, r)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mean, r = ctx.saved_tensors
        wants = [ctx.needs_input_grad[0], is_wanted(gamma), is_wanted(beta)]
        return *_NormalizationGradient.apply(gy, x, gamma, mean, r, ctx.layer, wants), None


class _NormalizationGradient(torch.autograd.Function):
    """(gx, gγ, gβ) of the normalization, as a function of (gy, x, γ)."""

    @staticmethod
    def forward(
        ctx: Any,
        gy: Tensor,
        x: Tensor,
        gamma: Tensor,
        mean: Tensor,
        r: Tensor,
        layer: _NormOptions,
        wants: list[bool],
    ) -> tuple[Tensor | None, ...]:
        gy = _match_layout(gy, x)
        ctx.save_for_backward(gy, x, gamma, mean, r)
        ctx.layer = layer
        if layer.groups is None:
            fixed = layer.fixed or (None, None)
            gradients = _aten.native_batch_norm_backward(
                gy, x, gamma, *fixed, mean, r, layer.fixed is None, layer.eps, wants
            )
        else:
            n, c, h, w = x.shape
            gradients = _aten.native_group_norm_backward(
                gy, x, mean, r, gamma, n, c, h * w, layer.groups, wants
            )
        return tuple(g if wanted else None for g, wanted in zip(gradients, wants, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, vx: Tensor, vgamma: Tensor, vbeta: Tensor) -> tuple[Tensor | None, ...]:
        # An output without a cotangent has one of zeros here.
        gy, x, gamma, mean, r = ctx.saved_tensors
        layer: _NormOptions = ctx.layer
        wants_gamma = is_wanted(gamma)
        gamma, vgamma, vbeta = (t.view(1, -1, 1, 1) for t in (gamma, vgamma, vbeta))
        count = x.numel() / r.numel()
        mean, r = (layer.spread(statistic, x.shape[1]) for statistic in (mean, r))
        hat = torch.addcmul(-mean * r, x, r)
        sum_vg = layer.local(vx * gy)
        scaled = gamma * r
        if layer.fixed is not None:
            to_gy = torch.addcmul(vbeta, scaled, vx).addcmul_(vgamma, hat)
            to_x = gy * (r * vgamma)
            to_gamma = r * sum_vg if wants_gamma else None
        else:
            sum_g, sum_ghat = layer.local(gy), layer.local(gy * hat)
            sums = [
                layer.local(vx),
                layer.local(vx * hat),
                sum_g,
                sum_ghat,
                sum_vg,
                sum_g,
                sum_ghat,
            ]
            one = torch.ones_like(gamma)
            weights = torch.stack([one, one, gamma, gamma, gamma, vgamma, vgamma])
            # Means over groups: m(vx), m(vx x̂), m(g), m(g x̂), m(vx g), m(vγ gy), m(vγ gy x̂).
            a, p, b, q, k, e, f = layer.group(torch.stack(sums) * weights) / count
            of_hat = torch.addcmul(vgamma, scaled, p, value=-1)
            constant = torch.addcmul(vbeta, scaled, a, value=-1)
            to_gy = torch.addcmul(constant, scaled, vx).addcmul_(of_hat, hat)
            # h = ∂s/∂x̂ at fixed r; what follows is the chain rule through x̂(x), and then through r:
            # m(h) = e - r (q a + p b); m(h x̂), and what comes through r: f + r (k - a b - 3 p q).
            minus, pq = -r, p * q
            mean_h = torch.addcmul(e, minus, torch.addcmul(q * a, p, b))
            through = torch.addcmul(k, a, b, value=-1).sub_(pq, alpha=3)
            mean_hhat = torch.addcmul(f, r, through)
            to_x = torch.addcmul(minus * mean_h, minus * r * q, vx)
            to_x.addcmul_(r * of_hat, gy).addcmul_(minus * mean_hhat, hat)
            to_gamma = r * (sum_vg - a * sum_g - p * sum_ghat) if wants_gamma else None
        return (to_gy, to_x, None if to_gamma is None else layer.channel(to_gamma), *(None,) * 4)


def relu(x: Tensor) -> Tensor:
    """Computes max(x, 0), without a second derivative, which is zero."""
    y: Tensor = _Relu.apply(x)
    return y


def max_pool(module: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Computes `module(x)` for x (N, C, H, W) and a module that returns no indices."""
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    sides = ([size, size] if isinstance(size, int) else list(size) for size in sizes)
    y: Tensor = _MaxPool.apply(x, (*sides, module.ceil_mode))
    return y


_Pool = tuple[list[int] | bool, ...]
"""Kernel, stride, padding and dilation, (down, across) each, and whether sizes are rounded up."""


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clamp_min(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # Detached, as a step has no slope: else autograd would add zeros as large as the layer.
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
        # The gradient scatters to the maxima, and the transpose of that gathers from them.
        return vx.flatten(2).gather(2, indices.flatten(2)).view(indices.shape), None, None, None
