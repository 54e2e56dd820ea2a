"""Images from a batch's update that is factored into features and error signals first.

Where the head can be solved (`best_features`), labels, features and error signals of every image
are known, and what is left is `body_gradient`: a least-squares problem in the images alone, each of
them with features of its own to reproduce. It is descended with the slopes of ReLU and max pooling
smoothed (`smooth_slopes`), without which every linear piece of the network has a local minimum of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.adversary import Attack, AttackState, solve
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.best_features import BestFeatures
from fedsim_attacks.body_gradient import BodyGradient, Misfit, signals
from fedsim_attacks.inverting_gradients import total_variation
from fedsim_attacks.matching import Matching
from fedsim_attacks.unrolled_update import UnrolledUpdate

_FINAL = 0.005
"""Step size at the end, over that of the beginning."""


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate images and what they are compared with."""

    misfit: Callable[[Tensor], Misfit]
    matching: Matching
    images: Tensor
    """(N, C, H, W), normalized."""
    optimizer: torch.optim.Adam
    features: Tensor
    labels: Tensor
    best: Tensor
    """Images of least own loss."""
    best_loss: Tensor


@final
class FactoredInversion(Attack[Descent]):
    """Recovers features, labels and error signals; then inverts the body with them held fixed.

    It needs a two-layer head and no knowledge of labels. Several local steps on the same batch are
    simulated instead, from the labels and the features that it recovers.
    """

    paper: ClassVar[str] = (
        "fedsim: features and error signals by best_features, squared distance of the body's "
        "update with smoothed slopes"
    )

    iterations: Annotated[int, Field(ge=1)] = 1500
    """Of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """In units of normalized pixels, falling as a cosine."""
    total_variation: Annotated[float, Field(ge=0)] = 0.03
    """Weight of the mean absolute difference of neighbouring pixels."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the relative squared distance of features."""
    jump_width: Annotated[float, Field(ge=0)] = 1.0
    """How wide a jump of a slope is to its derivative, in units of its input; 0: as it is."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Recover features, and start at random images.

        Raises:
            AttackFailed: the model has no two-layer head, or nothing is left of its gradient.
        """
        seed = int(torch.randint(2**31, (), generator=rng))
        found = solve(BestFeatures(), observation, knowledge, seed).reconstruction
        assert found.features is not None
        known = signals(observation, found.features)
        matching = Matching(observation)
        images = matching.random_candidate(known.labels, rng, std=0.3).images.detach()
        several = observation.training.steps > 1 or observation.num_clients > 1
        make = UnrolledUpdate if several else BodyGradient
        misfit = make(
            observation,
            found.features,
            known,
            weight=self.feature_weight,
            width=self.jump_width,
            calls=self.iterations,
        )
        infinite = torch.full((), torch.inf, device=images.device)
        return Descent(
            loss=infinite,
            misfit=misfit,
            matching=matching,
            images=images,
            optimizer=torch.optim.Adam([images], lr=self.step_size, betas=(0.9, 0.99), fused=True),
            features=found.features,
            labels=known.labels,
            best=images.clone(),
            best_loss=infinite,
        )

    def step(self, state: Descent) -> Descent:
        """One step of Adam, projected onto valid pixels."""
        images = state.images
        misfit = state.misfit(images)
        variation, slope = total_variation(images)
        state.loss = misfit.update + self.feature_weight * misfit.features
        state.loss = state.loss + self.total_variation * variation
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        images.grad = slope.mul_(self.total_variation).add_(misfit.slope)
        left = 0.5 + 0.5 * math.cos(math.pi * state.iteration / self.iterations)
        state.optimizer.param_groups[0]["lr"] = self.step_size * (_FINAL + (1 - _FINAL) * left)
        state.optimizer.step()
        images.clamp_(*state.matching.box)
        state.iteration += 1
        return state

    def terminate(self, state: Descent) -> bool:
        """After `iterations`."""
        return state.iteration >= self.iterations

    def postprocess(self, state: Descent) -> Reconstruction:
        """The iterate of least own loss, and the labels and features that it was built on."""
        return Reconstruction(
            images=state.matching.pixels(state.best),
            labels=state.labels,
            features=state.features,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations
