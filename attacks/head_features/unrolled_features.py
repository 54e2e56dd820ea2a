"""Features of the first of several local steps, from a fit of all (`unrolled_solver`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation
from fedsim_attacks.head_features._feature_solver import FeatureAttack
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._unrolled_solver import UnrolledSolver


@final
class UnrolledFeatures(FeatureAttack[UnrolledSolver]):
    """Fits the features of all local steps in the update's row space, and tells the first step's.

    It needs an exact row space: no noise, pruning or quantization. Its own loss is the largest
    part of a feature's error signal that the head before the first step does not imply; if
    features are the same in all steps, the part of ∂L/∂A that they do not explain.
    """

    paper: ClassVar[str] = (
        "fedsim: variable projection (Golub and Pereyra, 1973) over all steps of Liu et al.'s "
        "local aggregation, section 3"
    )

    iterations: Annotated[int, Field(ge=100)] = 1500
    """Of L-BFGS in each trial; it mostly ends earlier."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Fits, until one is consistent."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> UnrolledSolver:
        """Computes the row space, and draws random starts in it.

        Raises:
            AttackFailed: the model has no two-layer head, or a defense has left no exact rows.
        """
        head = HeadGradient.of(observation)
        return UnrolledSolver.start(head, self.iterations, self.trials, rng)

    def total(self) -> int:
        """Counts the iterations of all trials."""
        return self.iterations * (1 + self.trials)
