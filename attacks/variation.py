"""Total variation of images, whose color varies less than their brightness."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim_attacks.inverting_gradients import total_variation

_OPPONENTS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (0.5, -1.0, 0.5))
"""Brightness, and two directions of color."""
_COLOR = 3.0
"""What a difference in color counts, where one in brightness counts 1."""


def chromatic_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute difference of neighbours, in brightness and three times that in color.

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
