"""Gradient pruning, the sparsification of Zhu, Liu and Han 2019."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors
from fedsim_defenses.selection import largest, share


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
        """Returns the update with zeros for its smallest entries; the others stay bit for bit."""
        if self.scope == "global":
            return self._prune(update), state
        return {
            n: t for name in update for n, t in self._prune({name: update[name]}).items()
        }, state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns what held before: zeroing entries lengthens no update."""
        return before

    def effect(self, before: Guarantee) -> Effect:
        """Returns the effect of setting the smallest entries to zero."""
        return Effect(removed="smallest" if self.scope == "global" else "smallest_of_tensor")

    def _prune(self, update: Tensors) -> Tensors:
        total = sum(tensor.numel() for tensor in update.values())
        # The share is taken exactly: 0.29 of 100 entries are 29, which floating point makes 28.
        keep = largest(update, total - math.floor(share(self.ratio, total)))
        return {n: t.masked_fill(~keep[n], 0) for n, t in update.items()}
