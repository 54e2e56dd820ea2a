"""Prepares the pixels of every data source: resizing, splits, statistics, public images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedsim import rng
from fedsim.types import Dataset

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_IMAGES = 10_000
"""Maximum number of public images."""
_MAX_VALUES = 1 << 28
"""Maximum number of values of all public images: 256 MiB on disk and in every worker."""


def from_pil(image: Image) -> Tensor:
    """Copies a picture of Pillow, of mode `L` or `RGB`, to pixels (1 or 3, H, W) uint8."""
    import numpy as np

    # np.array copies: tensors may be written to, Pillow's own memory may not.
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def resize(image: Image, width: int, height: int) -> Image:
    """Resizes bicubically to `width` x `height` pixels; returns `image` itself if it has them."""
    from PIL.Image import Resampling

    if image.size == (width, height):
        return image
    return image.resize((width, height), Resampling.BICUBIC)


def stratified_split(labels: Tensor, test_fraction: float, name: str) -> tuple[Tensor, Tensor]:
    """Returns sorted (train, test) indices into `labels` (n,), by a draw in each class.

    The share `test_fraction` of each class, rounded, is test; `name` is the seed of the draw.
    """
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=rng.generator(0, "split", name, label))
        test[members[order[: round(test_fraction * len(members))]]] = True
    return (~test).nonzero().flatten(), test.nonzero().flatten()


def split_by_content(
    contents: Iterable[bytes], test_fraction: float, name: str
) -> tuple[Tensor, Tensor]:
    """Splits one or more examples by hashes of `contents`, keyed by `name`: (train, test) indices.

    Both are sorted, int64; either may be empty. An example is test with a chance of
    `test_fraction`, equal ones together; no other example moves it, as privacy claims require.
    """
    key = hashlib.sha256(b"fedsim split\0" + name.encode()).digest()
    # Digests of 8 bytes are uniform below 2^64, so a share `test_fraction` of them lies below this.
    most = round(test_fraction * 2**64)
    digests = (hashlib.blake2b(one, key=key, digest_size=8).digest() for one in contents)
    test = torch.tensor([int.from_bytes(digest, "big") < most for digest in digests])
    return (~test).nonzero().flatten(), test.nonzero().flatten()


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns means and deviations (>= 1/255), in [0, 1], of C channels of (N, C, H, W) uint8."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * levels).sum()
        means.append(float(mean))
        deviations.append(max(float((share * (levels - mean) ** 2).sum().sqrt()), 1 / 255))
    return tuple(means), tuple(deviations)


def public_examples(dataset: Dataset, seed: int) -> tuple[Tensor, Tensor]:
    """Returns test images (P, C, H, W) uint8, or rows (P, D) float32, and labels (P,) int64.

    They are the whole split or, of a longer one, as many as 10,000 examples and 2^28 values allow,
    drawn by `seed` and in the split's order.
    """
    images = dataset.test_images
    count = min(_MAX_IMAGES, max(1, _MAX_VALUES // images[0].numel()))
    if len(images) <= count:
        return images, dataset.test_labels
    drawn = torch.randperm(len(images), generator=rng.generator(seed, "public"))[:count]
    chosen = drawn.sort().values
    return images[chosen], dataset.test_labels[chosen]
