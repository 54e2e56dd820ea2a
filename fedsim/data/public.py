"""Chooses the public images that an attacker may be granted: some of the test split."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim import rng
from fedsim.types import Dataset

_MAX_IMAGES = 10_000
"""At most so many images are public."""
_MAX_VALUES = 1 << 28
"""All public images together have at most so many values: 256 MiB on disk and in every worker."""


def public_images(dataset: Dataset, seed: int) -> Tensor:
    """Returns images (P, C, H, W), uint8, that no client holds.

    These are at most 10,000 and at most 2^28 values, drawn by `seed` if there are more.
    """
    images = dataset.test_images
    count = min(_MAX_IMAGES, max(1, _MAX_VALUES // images[0].numel()))
    if len(images) <= count:
        return images
    drawn = torch.randperm(len(images), generator=rng.generator(seed, "public"))[:count]
    return images[drawn.sort().values]
