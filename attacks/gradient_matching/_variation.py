"""Total variation of images, each with its gradient in them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

Variation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""images (N, C, H, W) -> (how much they vary (0-d), its gradient in them)."""

_OPPONENTS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (0.5, -1.0, 0.5))
"""Brightness, and two directions of color."""
_COLOR = 3.0
"""What a difference in color counts, where one in brightness counts 1."""


def total_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean absolute difference of neighbours, down plus across, and its gradient."""
    slope = torch.zeros_like(images)
    for difference, later, earlier in (
        (images[:, :, 1:] - images[:, :, :-1], slope[:, :, 1:], slope[:, :, :-1]),
        (images[..., 1:] - images[..., :-1], slope[..., 1:], slope[..., :-1]),
    ):
        sign = difference.sign_().div_(max(1, difference.numel()))
        later += sign
        earlier -= sign
    # It scales with the images: by Euler's theorem it is the product with its own gradient.
    return torch.dot(slope.flatten(), images.flatten()), slope


def chromatic_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean absolute difference of neighbours, three times as much in color.

    Of `images` (N, 3, H, W), with its gradient in them; of any other number of channels
    `total_variation`.
    """
    if images.shape[1] != len(_OPPONENTS):
        return total_variation(images)
    directions = images.new_tensor(_OPPONENTS)
    directions /= torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    directions[1:] *= _COLOR
    turned = torch.einsum("kc,nchw->nkhw", directions, images).contiguous()
    variation, slope = total_variation(turned)
    return variation, torch.einsum("kc,nkhw->nchw", directions, slope).contiguous()


_TINY = 1e-8
"""Of a pixel's variation, below which its slope is 0 and not undefined."""


def opponent_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean length of the step to the next pixel, over channels and their differences.

    Of each pixel of each map sqrt(vertical² + horizontal²), where the maps are the channels of
    `images` (N, C, H, W) and the differences of any two of them (double opponents: red - green,
    red - blue, green - blue), and beyond the last row and column there is 0. With its gradient in
    the images. Values as in the public suite breaching's `modern` attack
    (github.com/JonasGeiping/breaching, TotalVariation with inner_exp 2, outer_exp 0.5).
    """
    pairs = list(combinations(range(images.shape[1]), 2))
    mixing = torch.eye(images.shape[1], dtype=images.dtype, device=images.device)
    mixing = torch.cat([mixing, *(mixing[a : a + 1] - mixing[b : b + 1] for a, b in pairs)])
    maps = torch.einsum("kc,nchw->nkhw", mixing, images)
    down, right = -maps, -maps
    down[:, :, :-1] += maps[:, :, 1:]
    right[..., :-1] += maps[..., 1:]
    length = torch.hypot(down, right)
    scale = (length.clamp_min(_TINY) * length.numel()).reciprocal_()
    down *= scale
    right *= scale
    slope = -down - right
    slope[:, :, 1:] += down[:, :, :-1]
    slope[..., 1:] += right[..., :-1]
    return length.mean(), torch.einsum("kc,nkhw->nchw", mixing, slope).contiguous()
