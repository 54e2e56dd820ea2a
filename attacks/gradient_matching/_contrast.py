"""The contrast of images, where the update does not tell.

A first convolution without bias in front of group norm gives the same outputs for an image and
for a multiple of it, and so the same gradient: an image's contrast about the mean color that
pixels are normalized by cannot be seen in any update. Behind any other group norm it is hard to
see, so that total variation takes it away where noise asks for much of that. But photographs are
exposed: the largest multiple of which all pixels are valid is the image itself for most of them
(for three quarters of 2,000 of CIFAR-10). Where an image is mostly guessed, less contrast is
nearer to the truth.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.models.base import normalize
from fedsim.types import ModelSpec

_VALID = 0.999
"""Share of the pixels that are to be valid: a few of a reconstruction are off."""


_INFORMED = 3.0
"""Odds that contrast is right, over those that an entry of the first stage's gradient is no noise:
1 is nearer on batches of 4 and 8, by 0.1 dB, and costs where images come out better, as of 2."""


def valid_range(spec: ModelSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Normalizes the pixels 0 and 1: (C, 1, 1) each, of the type and device of `like`."""
    ends = torch.tensor([0.0, 1.0], dtype=like.dtype, device=like.device).view(2, 1, 1, 1)
    low, high = normalize(ends.expand(2, spec.input_shape[0], 1, 1), spec)
    return low, high


def exposing(images: Tensor, box: tuple[Tensor, Tensor], contrast: float = 1.0) -> Tensor:
    """Computes factors (N, 1, 1, 1) that make normalized `images` (N, C, H, W) fill the `box`.

    `box` has the normalized images of the pixels 0 and 1, of opposite signs. The factors are
    multiplied by `contrast`, in [0, 1].
    """
    low, high = box
    share = torch.maximum(images / low, images / high).flatten(1).quantile(_VALID, dim=1)
    return contrast / share.clamp_min(torch.finfo(share.dtype).tiny).view(-1, 1, 1, 1)


def exposed(images: Tensor, box: tuple[Tensor, Tensor], contrast: float = 1.0) -> Tensor:
    """Multiplies normalized `images` (N, C, H, W) by the factors that make them fill `box`."""
    return exposing(images, box, contrast) * images


def trusted(noise: float) -> float:
    """Computes the contrast to show, in [0, 1], at a share of noise in the first stage's gradient.

    An estimate of correlation c with the truth is nearest to it with c of its contrast.
    """
    clear = _INFORMED * max(0.0, 1 - noise)
    return math.sqrt(clear / (noise + clear))
