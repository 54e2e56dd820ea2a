"""Clipping of the whole update, after Abadi et al. 2016, Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense, global_norm
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


@final
class Clip(UpdateDefense):
    """Scales the update g to g / max(1, ||g|| / norm), the L2 norm over all tensors together.

    The bound ||g|| <= norm holds of every update, also after rounding: an update whose norm is not
    finite becomes zero, and a scaled one that rounding left too long is shortened further. So it
    proves a sensitivity, and clipping twice is clipping once, bit for bit.
    """

    paper: ClassVar[str] = (
        "Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1; of a whole "
        "update: McMahan et al., Learning Differentially Private Recurrent Language Models, "
        "ICLR 2018"
    )

    deployed_parts: ClassVar[Mapping[str, Mapping[str, str]]] = {
        f"flwr.{home}.mod.centraldp_mods.{kind}clipping_mod": {"clipping_norm": "norm"}
        for home in ("clientapp", "client")
        for kind in ("fixed", "adaptive")
    }

    norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """Bound on ||g||, in the update's units (a gradient's, or weights' under fedavg)."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Returns the update, shortened to the bound, and `state`. See `UpdateDefense.apply`."""
        norm = float(global_norm(update))
        if norm <= self.norm:
            return update, state
        if not math.isfinite(norm):
            return {name: torch.zeros_like(tensor) for name, tensor in update.items()}, state
        return self._shorten(update, norm), state

    def guarantee(self, before: Guarantee) -> Guarantee:
        """Returns `before` with a sensitivity of at most `norm`. See `UpdateDefense.guarantee`."""
        return before.bounded(self.norm)

    def effect(self, before: Guarantee) -> Effect:
        """Returns an Effect that is `scaled`, with `bound` `norm`. See `UpdateDefense.effect`."""
        return Effect(scaled=True, bound=self.norm)

    def _shorten(self, update: Tensors, norm: float) -> Tensors:
        # Rounding may leave the scaled update too long: the margin grows from one unit of rounding.
        margin, step = 0.0, max(torch.finfo(tensor.dtype).eps for tensor in update.values())
        while True:
            scale = self.norm / norm * (1 - margin)
            clipped = {name: tensor * scale for name, tensor in update.items()}
            if float(global_norm(clipped)) <= self.norm:
                return clipped
            margin = min(1.0, 2 * margin + step)  # at 1 the update is zero and the loop ends
