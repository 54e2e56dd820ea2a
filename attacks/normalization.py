"""Batch and group normalization with a second derivative in closed form.

Notation: x̂ = (x - μ) r with r = 1/σ over a *group* of elements that share statistics (batch norm: a
channel; group norm: the channels of one image that belong together), y = γ x̂ + β with γ and β per
channel; m is the mean over a group, Σ the sum over a channel. For gy = ∂L/∂y and g = γ gy:

    gx = r (g - m(g) - x̂ m(g x̂))        gγ = Σ gy x̂        gβ = Σ gy

With fixed statistics (batch norm in eval mode) gx = r g. The second derivative is that of
s = <vx, gx> + <vγ, gγ> + <vβ, gβ> in gy, x and γ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsim_attacks.pruning import is_wanted

_aten = torch.ops.aten


class Layer(NamedTuple):
    """What is fixed about a normalization."""

    groups: int | None
    """Of group norm; None for batch norm."""
    eps: float
    running: tuple[Tensor, Tensor] | None
    """Fixed mean and variance, for batch norm in eval mode."""

    def grouped(self, x: Tensor) -> Tensor:
        """`x` with a dimension of its own for the groups of group norm."""
        return x if self.groups is None else x.unflatten(1, (self.groups, -1))

    @property
    def shared(self) -> tuple[int, ...]:
        """Dimensions of `grouped(x)` over which statistics are shared."""
        return (0, 2, 3) if self.groups is None else (2, 3, 4)

    @property
    def spread(self) -> tuple[int, ...]:
        """Dimensions of `grouped(x)` over which a channel extends."""
        return (0, 2, 3) if self.groups is None else (0, 3, 4)

    def per_channel(self, value: Tensor) -> Tensor:
        """(C,) in the shape that broadcasts with `grouped(x)`."""
        return self.grouped(value.view(1, -1, 1, 1))


def batch_norm(module: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """`module(x)`, without updating its running statistics."""
    running = None
    if not module.training and module.running_mean is not None:
        assert module.running_var is not None
        running = (module.running_mean, module.running_var)
    elif x.numel() == x.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    y: Tensor = _Normalization.apply(
        x, module.weight, module.bias, Layer(None, module.eps, running)
    )
    return y


def group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """`module(x)` of (N, C, H, W)."""
    y: Tensor = _Normalization.apply(
        x, module.weight, module.bias, Layer(module.num_groups, module.eps, None)
    )
    return y


class _Normalization(torch.autograd.Function):
    """y = γ x̂ + β."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, layer: Layer
    ) -> Tensor:
        if layer.groups is None:
            mean, variance = layer.running or (None, None)
            training = layer.running is None
            y, mu, r = _aten.native_batch_norm(
                x, gamma, beta, mean, variance, training, 0.0, layer.eps
            )
            if mean is not None and variance is not None:
                mu, r = mean, (variance + layer.eps).rsqrt()
        else:
            n, c, h, w = x.shape
            y, mu, r = _aten.native_group_norm(
                x, gamma, beta, n, c, h * w, layer.groups, layer.eps
            )
        ctx.save_for_backward(x, gamma, beta, mu, r)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta, mu, r = ctx.saved_tensors
        wants = [ctx.needs_input_grad[0], is_wanted(gamma), is_wanted(beta)]
        return *_NormalizationGradient.apply(gy, x, gamma, mu, r, ctx.layer, wants), None


class _NormalizationGradient(torch.autograd.Function):
    """(gx, gγ, gβ) of the normalization, as a function of (gy, x, γ)."""

    @staticmethod
    def forward(
        ctx: Any,
        gy: Tensor,
        x: Tensor,
        gamma: Tensor | None,
        mu: Tensor,
        r: Tensor,
        layer: Layer,
        wants: list[bool],
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(gy, x, gamma, mu, r)
        ctx.layer = layer
        if layer.groups is None:
            mean, variance = layer.running or (None, None)
            gradients: tuple[Tensor | None, ...] = _aten.native_batch_norm_backward(
                gy, x, gamma, mean, variance, mu, r, layer.running is None, layer.eps, wants
            )
        else:
            n, c, h, w = x.shape
            gradients = _aten.native_group_norm_backward(
                gy, x, mu, r, gamma, n, c, h * w, layer.groups, wants
            )
        return tuple(g if wanted else None for g, wanted in zip(gradients, wants, strict=True))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, vx: Tensor, vgamma: Tensor, vbeta: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Outputs without a cotangent arrive as zeros.
        gy, x, gamma, mu, r = ctx.saved_tensors
        layer: Layer = ctx.layer
        gy, x, vx = (layer.grouped(t) for t in (gy, x, vx))
        mu, r = (t.view(x.mean(layer.shared, keepdim=True).shape) for t in (mu, r))
        scale = torch.ones_like(x[:1, ..., :1, :1]) if gamma is None else layer.per_channel(gamma)
        return ()
