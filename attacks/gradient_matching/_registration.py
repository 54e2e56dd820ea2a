"""Registration of images to a target by translation: what aligns reconstructions of one image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def register(images: Tensor, target: Tensor, reach: int) -> Tensor:
    """Shifts each of `images` (N, C, H, W) to where it is closest to its `target` (N, C, H, W).

    All whole shifts of up to `reach` pixels down and across are tried, and the one of least squared
    distance is taken. What a shift uncovers repeats the border. No value is read back.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (reach,) * 4, mode="replicate") if reach else images
    best, least = images, (images - target).square().sum((1, 2, 3))
    for down in range(2 * reach + 1):
        for across in range(2 * reach + 1):
            shifted = padded[:, :, down : down + height, across : across + width]
            cost = (shifted - target).square().sum((1, 2, 3))
            best = torch.where((cost < least).view(-1, 1, 1, 1), shifted, best)
            least = torch.minimum(cost, least)
    return best
