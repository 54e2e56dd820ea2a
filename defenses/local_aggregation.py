"""Local aggregation: several local steps per round, as in FedAvg (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, final

from pydantic import Field

from fedsim.contracts.defense import TrainingDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Batches, Effect, LocalTraining


@final
class LocalAggregation(TrainingDefense):
    """Releases the change of the weights after `steps` SGD steps in place of one gradient."""

    paper: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
        "Data, AISTATS 2017, Algorithm 1"
    )

    steps: Annotated[int, Field(ge=1, le=1_000_000)]
    """SGD steps per round (E)."""
    batches: Batches = "different"
    """`same`: every step sees the same batch; `different`: each has its own."""

    def training(self, declared: LocalTraining) -> LocalTraining:
        """Returns `declared` with this defense's steps and batches, and algorithm `fedavg`."""
        return replace(declared, algorithm="fedavg", steps=self.steps, batches=self.batches)

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns `before`: summing steps proves nothing and takes nothing away."""
        return before

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an empty Effect: `training` already declares the steps."""
        return Effect()
