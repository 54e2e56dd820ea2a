"""Makes the views of images that an `Augmentation` declares, for client and attack alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from fedsim.types import ImageChange, InputSpec

_GRAY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a pixel's brightness (ITU-R BT.601, as Pillow has them)."""


def apply_view(images: Tensor, view: Sequence[ImageChange], spec: InputSpec) -> Tensor:
    """Returns `images` after the changes of `view`, in order; both are normalized as `spec` says.

    Images are (N, C, H, W). It is differentiable. What comes from outside of an image is black, and
    contrast keeps pixels in [0, 1]. Rows of a table (N, D) are returned as they are.
    """
    if not view or images.ndim != 4:
        return images
    mean, std = (images.new_tensor(each)[:, None, None] for each in (spec.mean, spec.std))
    # On pixels, where what enters is 0 and black; a normalized 0 would be the mean color.
    pixels = images * std + mean
    for change in view:
        pixels = _change(pixels, change)
    return (pixels - mean) / std


def _change(pixels: Tensor, change: ImageChange) -> Tensor:
    if change.name == "flip_x":
        return pixels.flip(-1)
    if change.name == "flip_y":
        return pixels.flip(-2)
    if change.name == "contrast":
        # As in Pillow: away from the image's mean brightness.
        weights = _GRAY if pixels.shape[1] == 3 else [1 / pixels.shape[1]] * pixels.shape[1]
        gray = (pixels * pixels.new_tensor(weights)[:, None, None]).sum(1, keepdim=True)
        middle = gray.mean((2, 3), keepdim=True)
        return (middle + change.by * (pixels - middle)).clamp(0, 1)
    height, width = pixels.shape[-2:]
    matrix = _affine(change, height, width)
    # Places -1 and 1 are the outer edges of the image, so that a pixel is 2 / side wide.
    grid = F.affine_grid(
        pixels.new_tensor(matrix).expand(len(pixels), 2, 3), list(pixels.shape), align_corners=False
    )
    return F.grid_sample(pixels, grid, mode="bilinear", align_corners=False)


def _affine(change: ImageChange, height: int, width: int) -> list[list[float]]:
    # From a view's places to the image's, both on [-1, 1] in each direction.
    if change.name == "rotate":
        turn = math.radians(change.by)
        cos, sin = math.cos(turn), math.sin(turn)
        # Sides of one length on the screen are 2 / width and 2 / height in these units.
        return [[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]
    if change.name == "shear":
        return [[1.0, change.by * height / width, 0.0], [0.0, 1.0, 0.0]]
    # By whole pixels: what moves is neither blurred nor changed.
    across = change.name == "translate_x"
    side = width if across else height
    by = 2 * math.floor(change.by * side + 0.5) / side
    return [[1.0, 0.0, by if across else 0.0], [0.0, 1.0, 0.0 if across else by]]
