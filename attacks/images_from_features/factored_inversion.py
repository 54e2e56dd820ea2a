"""Images from a batch's update that is factored into features and error signals first.

Where features can be recovered (`_heads` chooses how), labels, features and error signals of every
image are known, and what is left is `body_gradient`: a least-squares problem in the images alone,
each of them with features of its own to reproduce. It is descended with the slopes of ReLU and max
pooling smoothed (`smooth_slopes`), without which every linear piece of the network has a local
minimum of its own, and over images of several resolutions (`pyramid`).

What else an update asks for comes before or in place of that: `phases`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._contrast import exposing
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.gradient_matching._pyramid import Pyramid
from fedsim_attacks.gradient_matching._schedules import half_cosine
from fedsim_attacks.gradient_matching._variation import chromatic_variation
from fedsim_attacks.images_from_features._heads import recovered_if_told
from fedsim_attacks.images_from_features._image_prior import ImagePrior
from fedsim_attacks.images_from_features._peeling import StagePeeling
from fedsim_attacks.images_from_features._phases import Phase, Phases, Settings

_FINAL = 0.005
"""Step size at the end, over that of the beginning."""


@dataclass(kw_only=True)
class Descent(AttackState):
    """The candidate images and what they are compared with."""

    recovered: Reconstruction | None
    """Features as the head told them; None if it did not."""
    phases: Phases
    matching: Matching
    images: Tensor
    """(N, C, H, W), normalized."""
    pyramid: Pyramid
    best: Tensor
    """Images of least own loss."""
    best_loss: Tensor

    @property
    def phase(self) -> Phase:
        """The present one."""
        return self.phases.present

    @property
    def shown(self) -> Tensor:
        """The images of least own loss, with the contrast that the phase asks for."""
        return self.contrast_factors(self.best) * self.best

    def contrast_factors(self, images: Tensor) -> Tensor:
        """Computes the factors (N, 1, 1, 1) that give `images` the contrast of the phase."""
        contrast = self.phase.contrast
        if contrast is None:
            return images.new_ones(len(images), 1, 1, 1)
        return exposing(images, self.matching.box, contrast)


@final
class FactoredInversion(IterativeAttack[Descent]):
    """Recovers features, labels and error signals; then inverts the body with them held fixed.

    It needs no knowledge of labels, and no head of the server's making: an ordinary classifier of
    more classes than images tells as much (of a shallow body, directions of tensors are compared),
    and so does, of more images, a layer whose inputs `extreme_rays` finds. Several local steps are
    taken for one of the mean gradient, and then, if the body is not deep, simulated.
    """

    paper: ClassVar[str] = (
        "fedsim: features first (Liu et al., section 4; Kariyappa et al., ICML 2023), stages by "
        "their own gradient (Zhu and Blaschko, R-GAP, ICLR 2021), with error signals held fixed, "
        "in squared distance with smoothed slopes, or by each tensor's direction"
    )

    iterations: Annotated[int, Field(ge=1)] = 1500
    """Of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """In units of normalized pixels, falling as a cosine; twice as much against directions."""
    total_variation: Annotated[float, Field(ge=0)] = 0.02
    """Weight of the mean absolute difference of neighbouring pixels, three times that in color;
    it falls to 0.4 of it. More as noise demands; against directions it falls from ten times it."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the relative squared distance of features; a tenth of it against directions."""
    jump_width: Annotated[float, Field(ge=0)] = 1.0
    """How wide a jump of a slope is to its derivative, in units of its input; 0: as it is."""

    public: bool = True
    """Whether public images, if the threat model grants any, are a prior."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Descent:
        """Recovers features, and starts at random images.

        Where nothing tells features (`classifier_fit` and `extreme_rays` say why), the whole update
        is compared.

        Raises:
            AttackFailed: the model's head has no linear layer, or nothing is left of a two-layer
                head's gradient.
        """
        seed = int(torch.randint(2**31, (), generator=rng))
        recovered = recovered_if_told(observation, knowledge, seed)
        features = None if recovered is None else recovered.features
        public = knowledge.public_images if self.public else None
        prior = None if public is None else ImagePrior(observation, public)
        phases = Phases(observation, features, seed, self._settings(), prior)
        matching = Matching(observation)
        images = matching.random_candidate(phases.present.labels, rng, std=0.3).images.detach()
        if phases.distribution is not None:
            images = phases.distribution.means
        infinite = torch.full((), torch.inf, device=images.device)
        return Descent(
            loss=infinite,
            recovered=recovered,
            phases=phases,
            matching=matching,
            images=images,
            pyramid=_pyramid(images),
            best=images.clone(),
            best_loss=infinite,
        )

    def step(self, state: Descent) -> Descent:
        """Takes a step of Adam, projected onto valid pixels."""
        while state.phases.over(state.iteration):
            state.best = state.shown
            state.phases.follow(state.best)
            state.images, state.best_loss = state.best, torch.full_like(state.best_loss, torch.inf)
            state.pyramid = _pyramid(state.images)
        phase, images = state.phase, state.images
        if isinstance(phase.misfit, StagePeeling):
            state.loss = phase.misfit.step()
            state.iteration += 1
            return state
        done = state.phases.done(state.iteration)
        misfit = phase.misfit(images)
        variation, slope = chromatic_variation(images)
        final = phase.final_variation * phase.total_variation
        state.loss = misfit.update + phase.feature_weight * misfit.features + final * variation
        slope.mul_(phase.total_variation * phase.final_variation**done).add_(misfit.slope)
        if (distribution := state.phases.distribution) is not None:
            # Where the update does not see contrast, images have less than they are shown with.
            contrast_factors = state.contrast_factors(images)
            energy, energy_slope = distribution(contrast_factors * images)
            state.loss = state.loss + state.phases.distribution_weight * energy
            slope.addcmul_(energy_slope, contrast_factors, value=state.phases.distribution_weight)
        better = (state.loss < state.best_loss) | misfit.target_changed
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        state.pyramid.step(slope, phase.step_size * half_cosine(done, _FINAL))
        images.clamp_(*state.matching.box)
        state.iteration += 1
        return state

    def postprocess(self, state: Descent) -> Reconstruction:
        """Returns the iterate of least own loss, and the labels and features behind it.

        What is known of features is known of them as the head told them, and not of refitted ones.
        """
        told, phase = state.recovered, state.phase
        if told is None or phase.features is None or told.features is not phase.features:
            told = Reconstruction(loss=0.0, iterations=0)
        certified = told.certified
        if certified is not None and told.labels is not None:
            certified = certified & (told.labels == phase.labels)
        return Reconstruction(
            images=state.matching.pixels(state.shown),
            labels=state.phase.labels,
            features=state.phase.features,
            features_by=told.features_by,
            determined=told.determined,
            certified=certified,
            stages=state.phases.stages,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def _settings(self) -> Settings:
        return Settings(
            iterations=self.iterations,
            step_size=self.step_size,
            total_variation=self.total_variation,
            feature_weight=self.feature_weight,
            jump_width=self.jump_width,
        )


def _pyramid(images: Tensor) -> Pyramid:
    return Pyramid(images, betas=(0.9, 0.99))
