"""Improved Deep Leakage from Gradients, and the regularizer of Client Privacy Leakage.

Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020, Algorithm 1. Wei, Liu,
Loper, Chow, Gursoy, Truex and Wu, "A Framework for Evaluating Gradient Leakage Attacks in Federated
Learning", ESORICS 2020 (CPL).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim_attacks.gradient_matching._matching import granted_labels
from fedsim_attacks.gradient_matching.deep_leakage import Descent, GradientDistance
from fedsim_attacks.gradient_matching.inverting_gradients import tile


@dataclass(kw_only=True)
class LabelledDescent(Descent):
    """A descent whose images are also held to their labels."""

    misfit: Callable[[Tensor], tuple[Tensor, Tensor]]
    """`label_misfit` of the batch, as a function of the images."""


@final
class IDLG(GradientDistance):
    """Reads the labels off the last layer first, then matches the update over images alone.

    `label_weight` and `pattern` make it CPL (Wei et al.), for instance 0.1 and 4.
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

    def labels(self, observation: Observation, knowledge: Knowledge) -> Tensor | None:
        """Returns the true labels (N,) if the threat model grants them, else inferred ones."""
        return granted_labels(observation, knowledge)

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Draws images from N(0, `initial_std`²), as a tiling if `pattern` is given."""
        descent = super().init(observation, knowledge, rng)
        images, labels = descent.candidate.images, descent.candidate.labels
        assert labels is not None
        if self.pattern:
            if observation.model.columns:
                raise AttackFailed("rows of a table are no pictures: drop pattern")
            images.data = tile(images.data, self.pattern)
        return LabelledDescent(**vars(descent), misfit=label_misfit(observation, labels))

    def objective(self, state: Descent) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Adds the weighted misfit of labels to the distance of the updates."""
        distance, (slope,) = super().objective(state)
        if not self.label_weight:
            return distance, (slope,)
        assert isinstance(state, LabelledDescent)
        misfit, added = state.misfit(state.candidate.images)
        return distance + self.label_weight * misfit, (slope + self.label_weight * added,)


def label_misfit(
    observation: Observation, labels: Tensor
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Makes a function from normalized images to their mean |p - y|² (0-d) and its gradient."""
    model = rebuild(observation).train(observation.training.mode == "train")

    def misfit(images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            variable = images.detach().clone().requires_grad_()
            predicted = model(variable).softmax(1)
            wanted = F.one_hot(labels, predicted.shape[1])
            value = (predicted - wanted).square().sum(1).mean()
            (slope,) = torch.autograd.grad(value, variable)
        return value.detach(), slope

    return misfit
