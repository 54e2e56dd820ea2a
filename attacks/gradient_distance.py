"""What DLG and iDLG share: L-BFGS on the squared distance of the updates."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsim.attack import Attack, AttackState
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.matching import Candidate, Matching, squared_distance

_HISTORY = 100
_PER_STEP = 10
"""L-BFGS iterations between two looks of the runner: starting again costs one evaluation."""


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate and its optimizer."""

    matching: Matching
    candidate: Candidate
    optimizer: torch.optim.LBFGS
    stalled: bool = False
    """The line search found no lower point any more."""


class GradientDistance(Attack[Descent]):
    """Minimizes |u(x, y) - u|² / |u|² by L-BFGS with a strong-Wolfe line search.

    The division by the observed update's norm changes no minimum; it lets one tolerance serve
    updates of any scale, where a nearly fitted victim's gradient is 1e-4 and less.
    """

    iterations: Annotated[int, Field(ge=1)] = 300
    """Of L-BFGS; each is one to a few evaluations of the update."""
    precision: Literal["float32", "float64"] = "float64"
    """float64 costs up to twice the time and goes on where float32's line search ends."""

    @abstractmethod
    def start(
        self,
        matching: Matching,
        observation: Observation,
        knowledge: Knowledge,
        rng: torch.Generator,
    ) -> Candidate:
        """Where the descent begins."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Random images; labels as the method has them."""
        matching = Matching(observation, getattr(torch, self.precision))
        candidate = self.start(matching, observation, knowledge, rng)
        optimizer = torch.optim.LBFGS(
            candidate.variables,
            max_iter=_PER_STEP,
            history_size=_HISTORY,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )
        loss, _ = matching.differentiate(candidate, squared_distance)
        return Descent(loss=loss, matching=matching, candidate=candidate, optimizer=optimizer)

    def step(self, state: Descent) -> Descent:
        """Ten iterations of L-BFGS, or what is left of `iterations`."""
        left = min(_PER_STEP, self.iterations - state.iteration)
        state.optimizer.param_groups[0]["max_iter"] = left

        def evaluate() -> Tensor:
            loss, slopes = state.matching.differentiate(state.candidate, squared_distance)
            for variable, slope in zip(state.candidate.variables, slopes, strict=True):
                variable.grad = slope
            return loss

        before = _snapshot(state.candidate)
        state.optimizer.step(evaluate)
        loss, _ = state.matching.differentiate(state.candidate, squared_distance)
        if bool(loss < state.loss):
            state.loss = loss
        else:  # at the limit of the precision, or not finite: the last good point stands
            _restore(state.candidate, before)
            state.stalled = True
        state.iteration += left
        return state

    def terminate(self, state: Descent) -> bool:
        """After `iterations`, or when no lower point is found."""
        return state.stalled or state.iteration >= self.iterations

    def postprocess(self, state: Descent) -> Reconstruction:
        """The last iterate, which is the lowest."""
        return Reconstruction(
            images=state.matching.pixels(state.candidate.images),
            labels=state.candidate.hard_labels().detach(),
            loss=float(state.loss),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations


def _snapshot(candidate: Candidate) -> list[Tensor]:
    return [variable.detach().clone() for variable in candidate.variables]


@torch.no_grad()
def _restore(candidate: Candidate, values: list[Tensor]) -> None:
    for variable, value in zip(candidate.variables, values, strict=True):
        variable.copy_(value)
