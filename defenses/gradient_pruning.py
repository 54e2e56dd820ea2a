"""Gradient pruning, the sparsification of Zhu, Liu and Han 2019."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


@final
class GradientPruning(UpdateDefense):
    """Zeroes the floor(ratio n) entries of smallest magnitude among n.

    Of equal magnitudes the last in order of position go first; entries that are not finite count as
    the largest. Nothing is remembered: what is pruned is lost (`top_k` keeps it for later).
    """

    paper: ClassVar[str] = (
        "Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019, section 5.2 (gradient "
        "compression), after Lin et al., Deep Gradient Compression, ICLR 2018"
    )

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """Share of the entries that are zeroed."""
    scope: Literal["global", "tensor"] = "global"
    """`global`: over all tensors together; `tensor`: the same share of each."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update, smallest entries 0, and `state`. See `UpdateDefense.apply`."""
        if self.scope == "global":
            return self._prune(update), state
        return {
            n: t for name in update for n, t in self._prune({name: update[name]}).items()
        }, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before`: zeroing entries lengthens no update. See `UpdateDefense.guarantee`."""
        return before

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect with `removed`: `smallest`, or `smallest_of_tensor` by `scope`."""
        return Effect(removed="smallest" if self.scope == "global" else "smallest_of_tensor")

    def _prune(self, update: Tensors) -> Tensors:
        total = sum(tensor.numel() for tensor in update.values())
        # The share is taken exactly: 0.29 of 100 entries are 29, which floating point makes 28.
        keep = largest(update, total - math.floor(share(self.ratio, total)))
        return {n: t.masked_fill(~keep[n], 0) for n, t in update.items()}


def share(ratio: float, total: int) -> Fraction:
    """Returns `ratio` times `total`, exact in the decimal that the user wrote, and not rounded.

    >>> int(0.29 * 100), int(share(0.29, 100))
    (28, 29)
    """
    return Fraction(str(ratio)) * total


def largest(update: Tensors, count: int) -> dict[str, Tensor]:
    """Returns boolean masks, by name, of the `count` largest magnitudes over all of `update`.

    `count` is from 0 to the number of entries. Of equal magnitudes the first in order of position
    counts as the larger; entries that are not finite count as the largest of all.
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
