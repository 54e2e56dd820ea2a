"""Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD: Compressed Optimisation for
Non-Convex Problems, ICML 2018, Algorithm 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, Tensors


@final
class Sign(UpdateDefense):
    """Sends only the sign of each entry, times `scale`."""

    paper: ClassVar[str] = "Bernstein et al., signSGD, ICML 2018, Algorithm 1"

    scale: Annotated[float, Field(gt=0, le=1e6)] = 0.001
    """Magnitude of every entry sent, in the update's units."""

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return {name: self.scale * tensor.sign() for name, tensor in update.items()}, state

    def effect(self, before: Guarantee) -> Effect:
        return Effect(rounded=True, scaled=True)

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.unproven("sign adds no noise, and its size grows with the model")
