"""Deep Leakage from Gradients, its improvement, and the regularizer of Client Privacy Leakage.

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019, Algorithm 1. Zhao, Mopuri and Bilen,
"iDLG: Improved Deep Leakage from Gradients", 2020, Algorithm 1. Wei, Liu, Loper, Chow, Gursoy,
Truex and Wu, "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", ESORICS
2020 (CPL).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import Classifier
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Matching,
    granted_labels,
    squared_distance,
)
from fedsim_attacks.gradient_matching.inverting_gradients import tile

_TOGETHER = 20  # iterations of L-BFGS in one step of the attack


@dataclass(kw_only=True)
class _Descent(AttackState):
    matching: Matching
    candidate: Candidate
    optimizer: torch.optim.LBFGS
    converged: bool = False
    """Whether the optimizer has stopped early: no step improves the objective any more."""
    model: Classifier  # the victim's model, whose predictions may be held to labels


class _GradientDistance(IterativeAttack[_Descent]):
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
    def _labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns labels (N,) int64, or None if soft labels are to be optimized with the images."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _Descent:
        """Draws images from N(0, `initial_std`²), and logits from N(0, 1) of soft labels."""
        matching = Matching(observation, tensors=self.tensors)
        candidate = matching.random_candidate(
            self._labels(observation, knowledge), rng, self.initial_std
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
        return _Descent(
            loss=torch.full((), torch.inf, device=matching.device),
            matching=matching,
            candidate=candidate,
            optimizer=optimizer,
            model=rebuild(observation).train(observation.training.mode == "train"),
        )

    def _objective(self, state: _Descent) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the updates' squared distance (0-d), and its slope in each variable."""
        return state.matching.differentiate(state.candidate, squared_distance)

    def step(self, state: _Descent) -> _Descent:
        """Runs at most 20 iterations of L-BFGS, each of which counts in `iteration`."""

        def closure() -> Tensor:
            loss, gradients = self._objective(state)
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

    def terminate(self, state: _Descent) -> bool:
        """Says whether `iterations` steps are made, or no step improves the objective any more."""
        return state.converged or super().terminate(state)

    def postprocess(self, state: _Descent) -> Reconstruction:
        """Returns images and hard labels, with the squared distance of their update as the loss."""
        loss, _ = state.matching.differentiate(state.candidate, squared_distance)
        return Reconstruction(
            images=state.matching.pixels(state.candidate.images),
            labels=state.candidate.hard_labels(),
            loss=float(loss),
            iterations=state.iteration,
        )


@final
class DeepLeakage(_GradientDistance):
    """Matches the update in squared distance by L-BFGS, over images and soft labels together.

    Labels that the threat model declares known are taken as given; all others are optimized.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, Algorithm 1"

    def _labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        return granted_labels(observation, knowledge) if knowledge.grant.labels == "known" else None


@final
class IDLG(_GradientDistance):
    """Reads the labels off the last layer first, then matches the update over images alone.

    `label_weight` and `pattern`, such as 0.1 and 4, make it Client Privacy Leakage (Wei et al.).
    """

    paper: ClassVar[str] = (
        "Zhao et al., iDLG, 2020, Algorithm 1; batches as in label_inference; label_weight and "
        "pattern: Wei et al., Gradient Leakage Attacks in Federated Learning, ESORICS 2020"
    )
    needs: ClassVar[Grant] = Grant.least(labels="inferred")

    label_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean |p - y|² of an image's predicted probabilities p, and its label y."""
    pattern: Annotated[int, Field(ge=1)] | None = None
    """Side in pixels of the random patch that each image starts as a tiling of; default: none."""

    def _labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        return granted_labels(observation, knowledge)

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _Descent:
        """Draws images; AttackFailed if `pattern` is to tile table rows. See `Attack.init`."""
        descent = super().init(observation, knowledge, rng)
        if self.pattern:
            if observation.model.columns:
                raise AttackFailed("rows of a table are no pictures: drop pattern")
            images = descent.candidate.images
            images.data = tile(images.data, self.pattern)
        return descent

    def _objective(self, state: _Descent) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Adds the weighted misfit of labels to the distance of the updates."""
        distance, (slope,) = super()._objective(state)
        if not self.label_weight:
            return distance, (slope,)
        images, labels = state.candidate.images, state.candidate.targets()
        misfit, added = _label_misfit(state.model, images, labels)
        return distance + self.label_weight * misfit, (slope + self.label_weight * added,)


def _label_misfit(model: Classifier, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the mean |p - y|² (0-d) of normalized `images`, and its gradient in them."""
    with torch.enable_grad():
        variable = images.detach().clone().requires_grad_()
        predicted = model(variable).softmax(1)
        wanted = F.one_hot(labels, predicted.shape[1])
        value = (predicted - wanted).square().sum(1).mean()
        (slope,) = torch.autograd.grad(value, variable)
    return value.detach(), slope
