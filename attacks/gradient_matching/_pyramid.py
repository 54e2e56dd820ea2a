"""Images as a sum of coarser ones, so that a descent moves regions as well as pixels.

Adam gives every variable a step of its own size. Over pixels alone, what they have in common, a
region's brightness or color, is the sum of many small and noisy steps, and group norm makes the
update tell little of it. As variables of their own, coarse images take steps of full size there.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

_COARSEST = 4
"""Least side of a coarse image; below there is only the mean."""


@final
class Pyramid:
    """Adam over images and over coarser ones that are added to them."""

    def __init__(self, images: Tensor, *, betas: tuple[float, float]) -> None:
        """Descends from `images` (N, C, H, W), which it changes in place.

        The coarse ones start at zero: halves of (H, W) while both sides are at least 4, and one
        pixel an image.
        """
        self.images = images
        height, width = images.shape[2] // 2, images.shape[3] // 2
        sizes = []
        while min(height, width) >= _COARSEST:
            sizes.append((height, width))
            height, width = height // 2, width // 2
        self._coarse = [images.new_zeros(*images.shape[:2], *size) for size in [*sizes, (1, 1)]]
        self._optimizer = torch.optim.Adam([images, *self._coarse], betas=betas, fused=True)

    def step(self, slope: Tensor, step_size: float) -> None:
        """Takes a step of Adam on every level, given the objective's gradient in the images."""
        before = [level.clone() for level in self._coarse]
        self.images.grad = slope
        for level in self._coarse:
            level.grad = self._restricted(slope, level)
        (group,) = self._optimizer.param_groups
        group["lr"] = step_size
        self._optimizer.step()
        for level, old in zip(self._coarse, before, strict=True):
            self.images.add_(self._prolonged(level - old))

    def _prolonged(self, level: Tensor) -> Tensor:
        """Enlarges a level to the images' size, bilinearly."""
        return F.interpolate(level, self.images.shape[2:], mode="bilinear", align_corners=False)

    def _restricted(self, slope: Tensor, level: Tensor) -> Tensor:
        """Computes the gradient in one level, by the transpose of `_prolonged`."""
        with torch.enable_grad():
            variable = level.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._prolonged(variable), variable, slope)
        return gradient
