"""The images that an attacker has who is granted public ones: some of the test split."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim import rng
from fedsim.types import Dataset

_MOST = 10_000
_MOST_VALUES = 1 << 28
"""Of all images together: 256 MiB on disk, and as much in every worker."""


def public_images(dataset: Dataset, seed: int) -> Tensor:
    """Images (P, C, H, W), uint8, that no client holds: at most 10,000, then drawn by `seed`.

    Of large images fewer, 2^28 values at most.
    """
    images = dataset.test_images
    most = min(_MOST, max(1, _MOST_VALUES // images[0].numel()))
    if len(images) <= most:
        return images
    drawn = torch.randperm(len(images), generator=rng.generator(seed, "public"))[:most]
    return images[drawn.sort().values]
