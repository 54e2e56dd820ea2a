"""Features by fitting the observed ∂L/∂A = D σ(X W' + b) of a two-layer head (`output_fit`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation
from fedsim_attacks.head_features._feature_solver import FeatureAttack
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._lbfgs import ITERATIONS
from fedsim_attacks.head_features._output_fit import OutputFit
from fedsim_attacks.head_features._output_solver import OutputSolver
from fedsim_attacks.head_features._random_starts import random_starts


@final
class HeadFit(FeatureAttack[OutputSolver]):
    """Fits ∂L/∂A of a two-layer head by variable projection: L-BFGS over the features.

    It works under noise, pruning and clipping, for any activation. Signs and, through the
    probabilities that the features imply, norms are recovered.
    """

    paper: ClassVar[str] = (
        "Variable projection (Golub and Pereyra, 1973) on the gradient of Liu et al., Data "
        "Reconstruction Attacks and Defenses, section 2.1"
    )

    iterations: Annotated[int, Field(ge=ITERATIONS)] = 1500
    """Of L-BFGS, for the best start and its splits; it mostly ends earlier."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Random starts that are tried for 20 iterations, and as many more if all lead astray."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> OutputSolver:
        """Draws random features around the direction that all have in common.

        Raises:
            AttackFailed: the model has no two-layer head, or nothing is left of ∂L/∂A.
        """
        head = HeadGradient.of(observation)
        starts = list(random_starts(head, 2 * self.starts, rng))
        first, second = starts[: self.starts], starts[self.starts :]
        fit = OutputFit.start(head, first)
        return OutputSolver(attempt=fit, budget=self.total(), second_starts=second)

    def total(self) -> int:
        """Counts `iterations`, and those of the starts that are not the best."""
        return self.iterations + ITERATIONS * (self.starts - 1)
