"""Top-k sparsification with error feedback (Mem-SGD) of Stich, Cordonnier and Jaggi 2018."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense, all_finite
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors
from fedsim_defenses.gradient_pruning import largest, share


@final
class TopK(UpdateDefense):
    """Sends the ceil(ratio n) largest of the n entries of update + memory; remembers the rest.

    Nothing is lost: what is sent plus the new memory is the update plus the old memory, bit for
    bit. Of equal magnitudes the first in order of position are sent. An update that is not finite
    is sent as it is and leaves the memory alone.
    """

    paper: ClassVar[str] = (
        "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018, Algorithm 1"
    )

    ratio: Annotated[float, Field(gt=0, le=1)]
    """Share of the entries that are sent."""

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        """Returns an empty memory by name: zeros, shaped and typed like `update`."""
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update that is sent, and the new memory. See `UpdateDefense.apply`."""
        if not all_finite(update):
            return update, state
        # Sent and kept are the two parts of this very sum, so that nothing is lost to rounding.
        owed = {name: tensor + state[name] for name, tensor in update.items()}
        total = sum(tensor.numel() for tensor in owed.values())
        send = largest(owed, math.ceil(share(self.ratio, total)))
        sent = {name: tensor.masked_fill(~send[name], 0) for name, tensor in owed.items()}
        return sent, {name: tensor.masked_fill(send[name], 0) for name, tensor in owed.items()}

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before` without a bound on the update: the memory adds to it."""
        return before.unproven("top_k adds what earlier rounds left over to the update")

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect whose `removed` is `smallest`. See `UpdateDefense.effect`."""
        return Effect(removed="smallest")
