"""Deep Leakage from Gradients, and what iDLG shares: L-BFGS on the squared distance of updates.

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019, Algorithm 1.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Matching,
    granted_labels,
    squared_distance,
)

_TOGETHER = 20
"""Iterations of L-BFGS in one step of the attack."""


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate and its optimizer."""

    matching: Matching
    candidate: Candidate
    optimizer: torch.optim.LBFGS
    converged: bool = False
    """Whether the optimizer has stopped early: no step improves the objective any more."""


class GradientDistance(IterativeAttack[Descent]):
    """Minimizes |u - t|² / |t|² over candidate images by L-BFGS with a strong-Wolfe line search."""

    iterations: Annotated[int, Field(ge=1)] = 300
    """Steps of L-BFGS; each evaluates the objective once or a few times. The authors of DLG
    and iDLG call an optimizer 300 times, and each call takes up to 20 steps: up to 6,000."""
    initial_std: Annotated[float, Field(gt=0)] = 0.3
    """Images start at N(0, initial_std²), in units of normalized pixels. The papers start at 1,
    from where batches take several times as many iterations."""
    tensors: ComparedTensors = "all"
    """Tensors of the update that are matched: all, or all but the classifier's head (body)."""

    @abstractmethod
    def labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns labels (N,) int64, or None if soft labels are to be optimized with the images."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Draws images from N(0, `initial_std`²), and logits from N(0, 1) without `labels`."""
        matching = Matching(observation, tensors=self.tensors)
        candidate = matching.random_candidate(
            self.labels(observation, knowledge), rng, self.initial_std
        )
        optimizer = torch.optim.LBFGS(
            candidate.variables,
            max_iter=_TOGETHER,
            # PyTorch allows 1.25 evaluations an iteration by default: a line search may take more.
            max_eval=25 * _TOGETHER,
            # PyTorch's tolerances are absolute, and slopes of a relative distance are small.
            tolerance_grad=1e-12,
            tolerance_change=1e-15,
            line_search_fn="strong_wolfe",
        )
        loss = torch.full((), torch.inf, device=matching.device)
        return Descent(loss=loss, matching=matching, candidate=candidate, optimizer=optimizer)

    def objective(self, state: Descent) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the updates' squared distance (0-d), and its slope in each variable."""
        return state.matching.differentiate(state.candidate, squared_distance)

    def step(self, state: Descent) -> Descent:
        """Runs at most 20 iterations of L-BFGS, each of which counts in `iteration`."""

        def closure() -> Tensor:
            loss, gradients = self.objective(state)
            for variable, slope in zip(state.candidate.variables, gradients, strict=True):
                variable.grad = slope
            return loss

        group = state.optimizer.param_groups[0]
        group["max_iter"] = min(_TOGETHER, self.iterations - state.iteration)
        before = state.optimizer.step(closure)  # type: ignore[no-untyped-call]
        # L-BFGS keeps its counter under its first parameter.
        memory = state.optimizer.state[state.candidate.images]
        done = memory["n_iter"] - state.iteration
        # It stops before its last iteration only where no step improves anything.
        state.converged = done < group["max_iter"]
        state.iteration = memory["n_iter"]
        state.loss = torch.as_tensor(memory.get("prev_loss", before))
        return state

    def terminate(self, state: Descent) -> bool:
        """Says whether `iterations` steps are made, or no step improves the objective any more."""
        return state.converged or state.iteration >= self.iterations

    def postprocess(self, state: Descent) -> Reconstruction:
        """Returns images and hard labels, with the squared distance of their update as the loss."""
        loss, _ = state.matching.differentiate(state.candidate, squared_distance)
        return Reconstruction(
            images=state.matching.pixels(state.candidate.images),
            labels=state.candidate.hard_labels(),
            loss=float(loss),
            iterations=state.iteration,
        )


@final
class DeepLeakage(GradientDistance):
    """Matches the update in squared distance by L-BFGS, over images and soft labels together.

    Only labels that the threat model declares known are taken as given: the method infers them
    itself.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, Algorithm 1"

    def labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns the true labels (N,) if the threat model grants them as known, else None."""
        return granted_labels(observation, knowledge) if knowledge.grant.labels == "known" else None
