"""Which entries of an update are the largest: exact counts, deterministic ties, linear time."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fedsim.types import Tensors


def share(ratio: float, total: int) -> Fraction:
    """Returns `ratio` of `total`, exact in the decimal that the user wrote, and not rounded.

    >>> int(0.29 * 100), int(share(0.29, 100))
    (28, 29)
    """
    return Fraction(str(ratio)) * total


def largest(update: Tensors, count: int) -> dict[str, Tensor]:
    """Returns boolean masks of the `count` entries of largest magnitude over all tensors together.

    Of equal magnitudes the first in order of position counts as the larger; entries that are not
    finite count as the largest of all.
    """
    total = sum(tensor.numel() for tensor in update.values())
    if count in (0, total):
        return {n: torch.full_like(t, count > 0, dtype=torch.bool) for n, t in update.items()}
    magnitudes = torch.cat([tensor.detach().abs().flatten() for tensor in update.values()])
    magnitudes = magnitudes.to(torch.promote_types(magnitudes.dtype, torch.float32))
    magnitudes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    # The least magnitude that is kept, in linear time; sorting would take n log n.
    threshold = magnitudes.kthvalue(total - count + 1).values
    keep = magnitudes > threshold
    # Several entries may equal it: as many are kept as the count still asks for, in order.
    ties = (magnitudes == threshold).nonzero().squeeze(1)
    keep[ties[: count - int(keep.sum())]] = True
    parts = torch.split(keep, [tensor.numel() for tensor in update.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(update.items(), parts, strict=True)
    }
