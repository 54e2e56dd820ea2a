"""Dropout in the classifier's head as a defense."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, final

from pydantic import Field

from fedsim.contracts.defense import TrainingDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, LocalTraining


@final
class Dropout(TrainingDefense):
    """Drops each hidden neuron of the model's head with probability `rate` in every local step."""

    paper: ClassVar[str] = (
        "Srivastava et al., Dropout, JMLR 2014; as a defense: Zheng, Dropout against Deep Leakage "
        "from Gradients, arXiv 2108.11106, 2021"
    )

    rate: Annotated[float, Field(ge=0, lt=1)]
    """Probability that a neuron is dropped; the others are scaled by 1 / (1 - rate)."""

    def training(self, declared: LocalTraining) -> LocalTraining:
        """Returns `declared` with `rate` as its `dropout`. See `TrainingDefense.training`."""
        return replace(declared, dropout=self.rate)

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns `before`: dropout proves nothing and takes nothing away."""
        return before

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an empty Effect: `training` already declares the dropout."""
        return Effect()
