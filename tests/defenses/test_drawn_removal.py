"""The contract suite lets a defense draw which entries it removes, and no more by chance."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from fedsim.contracts.defense import UpdateDefense, uniform
from fedsim.contracts.guarantee import Guarantee
from fedsim.testing import UpdateDefenseContract
from fedsim.types import Effect, Tensors


class DrawnRemoval(UpdateDefense):
    """Sets each entry to zero with a chance of one half, finite or not."""

    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD, NeurIPS 2018, section 2"

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        kept = {name: uniform(tensor.shape, rng) < 0.5 for name, tensor in update.items()}
        return {
            name: torch.where(kept[name], tensor, torch.zeros_like(tensor))
            for name, tensor in update.items()
        }, state

    def effect(self, before: Guarantee) -> Effect:
        return Effect(removed="others")

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before


class TestDrawnRemoval(UpdateDefenseContract):
    def make(self) -> DrawnRemoval:
        return DrawnRemoval()


class Jittered(DrawnRemoval):
    """Also multiplies what is left by a factor that it draws, and does not say so."""

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        removed, state = super().apply(update, state, rng)
        factor = float(uniform((1,), rng))
        return {name: factor * tensor for name, tensor in removed.items()}, state


def test_what_else_differs_by_chance_is_refused() -> None:
    class Suite(UpdateDefenseContract):
        def make(self) -> Jittered:
            return Jittered()

    with pytest.raises(AssertionError, match="declare it"):
        Suite().test_the_declared_noise_is_added()
