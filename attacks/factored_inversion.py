"""Images from a batch's update that is factored into features and error signals first.

Where the head can be solved (`best_features`), labels, features and error signals of every image
are known, and what is left is `body_gradient`: a least-squares problem in the images alone, each of
them with features of its own to reproduce. It is descended with the slopes of ReLU and max pooling
smoothed (`smooth_slopes`), without which every linear piece of the network has a local minimum of
its own, and over images of several resolutions (`pyramid`).
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
from fedsim_attacks.body_gradient import BodyGradient, Misfit, Signals, signals
from fedsim_attacks.matching import Matching
from fedsim_attacks.pyramid import Pyramid
from fedsim_attacks.unrolled_update import UnrolledUpdate, as_one_gradient
from fedsim_attacks.variation import chromatic_variation

_FINAL = 0.005
"""Step size at the end, over that of the beginning."""
_FINAL_VARIATION = 0.4
"""Weight of the total variation at the end, over that of the beginning: it costs contrast, which
the update restores once the images are nearly right."""
_ROUGH = 0.7
"""Share of the iterations that take several steps for one gradient, at a seventh of the cost."""
_ROUGH_FEATURES, _ROUGH_VARIATION = 10.0, 0.1
"""Weights there: features are known better than that holds, and it leaves more to be smoothed."""
_FINE_STEP = 0.3
"""Times the step size when the steps are then unrolled: from far they lead anywhere."""


@dataclass(frozen=True)
class Phase:
    """What images are compared with for some iterations, and how they move."""

    misfit: Callable[[Tensor], Misfit]
    iterations: int
    step_size: float
    feature_weight: float
    total_variation: float


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate images and what they are compared with."""

    phases: list[Phase]
    """Those to come, and the present one first."""
    begun: int = 0
    """Iterations before the present one."""
    matching: Matching
    images: Tensor
    """(N, C, H, W), normalized."""
    pyramid: Pyramid
    features: Tensor
    labels: Tensor
    best: Tensor
    """Images of least own loss."""
    best_loss: Tensor


@final
class FactoredInversion(Attack[Descent]):
    """Recovers features, labels and error signals; then inverts the body with them held fixed.

    It needs a two-layer head and no knowledge of labels. Of several local steps it takes the mean
    gradient for one step's at first, and then simulates them, from the labels and the features that
    it recovers.
    """

    paper: ClassVar[str] = (
        "fedsim: features and error signals by best_features, squared distance of the body's "
        "update with smoothed slopes"
    )

    iterations: Annotated[int, Field(ge=1)] = 1500
    """Of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """In units of normalized pixels, falling as a cosine."""
    total_variation: Annotated[float, Field(ge=0)] = 0.02
    """Weight of the mean absolute difference of neighbouring pixels, three times that in color;
    it falls to 0.4 of it."""
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
        phases = self._phases(observation, found.features, known)
        infinite = torch.full((), torch.inf, device=images.device)
        return Descent(
            loss=infinite,
            phases=phases,
            matching=matching,
            images=images,
            pyramid=_pyramid(images),
            features=found.features,
            labels=known.labels,
            best=images.clone(),
            best_loss=infinite,
        )

    def step(self, state: Descent) -> Descent:
        """One step of Adam, projected onto valid pixels."""
        while state.iteration - state.begun >= state.phases[0].iterations:
            del state.phases[0]
            state.begun = state.iteration
            state.images, state.best_loss = state.best, torch.full_like(state.best_loss, torch.inf)
            state.pyramid = _pyramid(state.images)
        phase, images = state.phases[0], state.images
        misfit = phase.misfit(images)
        variation, slope = chromatic_variation(images)
        done = (state.iteration - state.begun) / phase.iterations
        final = _FINAL_VARIATION * phase.total_variation
        state.loss = misfit.update + phase.feature_weight * misfit.features + final * variation
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        weight = phase.total_variation * _FINAL_VARIATION**done
        left = 0.5 + 0.5 * math.cos(math.pi * done)
        step_size = phase.step_size * (_FINAL + (1 - _FINAL) * left)
        state.pyramid.step(slope.mul_(weight).add_(misfit.slope), step_size)
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

    def _phases(self, observation: Observation, features: Tensor, known: Signals) -> list[Phase]:
        """One; of several local steps two: as if they were one gradient, and then unrolled."""

        def phase(
            make: type[BodyGradient | UnrolledUpdate],
            of: Observation,
            iterations: int,
            step_size: float,
            weight: float,
            variation: float,
        ) -> Phase:
            misfit = make(
                of, features, known, weight=weight, width=self.jump_width, calls=iterations
            )
            return Phase(misfit, iterations, step_size, weight, variation)

        size, weight, variation = self.step_size, self.feature_weight, self.total_variation
        if observation.training.steps == 1 and observation.num_clients == 1:
            return [phase(BodyGradient, observation, self.iterations, size, weight, variation)]
        rough = int(_ROUGH * self.iterations)
        return [
            phase(
                BodyGradient,
                as_one_gradient(observation),
                rough,
                size,
                _ROUGH_FEATURES * weight,
                max(_ROUGH_VARIATION, variation),
            ),
            phase(
                UnrolledUpdate,
                observation,
                self.iterations - rough,
                _FINE_STEP * size,
                weight,
                variation,
            ),
        ]


def _pyramid(images: Tensor) -> Pyramid:
    return Pyramid(images, betas=(0.9, 0.99))
