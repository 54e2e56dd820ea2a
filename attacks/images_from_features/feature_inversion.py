"""Gradient inversion with recovered features, through an untrained U-Net.

Liu, Wang, Du and Lei, Data Reconstruction Attacks and Defenses: A Systematic Evaluation, section 4
(equations 2 and 3) and Appendix D: reweighted gradient matching + α_TV TV + α_BN BN + α_f R, where
the features that R holds candidates to are also fed to the U-Net.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._candidate import Candidate
from fedsim_attacks.gradient_matching._distances import (
    Distance,
    cosine_distance,
    reweighted_cosine,
)
from fedsim_attacks.gradient_matching._drawing import Canvas, Drawing
from fedsim_attacks.gradient_matching._forward_prior import Features, ForwardPrior
from fedsim_attacks.gradient_matching._matching import Matched, Matching, granted_labels
from fedsim_attacks.gradient_matching.inverting_gradients import regularized
from fedsim_attacks.images_from_features._heads import recover
from fedsim_attacks.images_from_features._signals import signals


@dataclass(kw_only=True)
class Inversion(AttackState):
    """What draws the images, its optimizer, and what they are held to."""

    matching: Matching
    drawing: Drawing
    labels: Tensor
    prior: ForwardPrior
    distance: Distance
    recovered: Reconstruction | None
    """Features, and which attack they are by; None if none are wanted."""
    best: Tensor
    best_loss: Tensor


@final
class FeatureInversion(IterativeAttack[Inversion]):
    """Matches the update's direction through a U-Net that is told the recovered features.

    With `features`, which the model has to give away, labels are taken from them; without, as the
    threat model grants them. The batch-norm term is there if the threat model grants statistics.
    """

    paper: ClassVar[str] = (
        "Liu et al., Data Reconstruction Attacks and Defenses: A Systematic Evaluation, section 4"
    )

    iterations: Annotated[int, Field(ge=1)] = 10_000
    """Of Adam."""
    prior: Canvas = "unet"
    """What is optimized: the weights of an untrained U-Net, or the pixels."""
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = 64
    """Channels of the U-Net at full resolution."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Of Adam, divided by 10 at 3/8, 5/8 and 7/8; default 0.001 for the U-Net and 0.1 for pixels.
    The paper states 0.00001, which draws next to nothing in 10,000 iterations."""
    reweighted: bool = True
    """Cosine by tensor, weighted by its number of non-zero parameters; else over all together."""
    features: Literal["squared_cosine", "relative", "none"] = "squared_cosine"
    """What holds candidates to the recovered features: 1 - cos² (equation 2, sign-free), the
    relative squared distance (where they have sign and norm), or nothing."""
    total_variation: Annotated[float, Field(ge=0)] = 0.01
    """α_TV."""
    batch_norm: Annotated[float, Field(ge=0)] = 0.001
    """α_BN."""
    feature_weight: Annotated[float, Field(ge=0)] = 0.1
    """α_f."""
    tensors: Matched = "all"
    """Which tensors of the update are matched: all, or those of the body, that is, all but the
    classifier's head. The paper reweights all; the head has most of the parameters."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Inversion:
        """Recovers features; draws random pixels, or a U-Net of random weights.

        Raises:
            AttackFailed: features are wanted and not told, or nothing of the update is the body's.
        """
        seed = int(torch.randint(2**31, (), generator=rng))
        recovered, features, labels = None, None, None
        if self.features != "none":
            recovered = recover(observation, knowledge, seed)
            features = recovered.features
            assert features is not None
            labels = signals(observation, features).labels
        else:
            labels = granted_labels(observation, knowledge)
        if labels is None:
            labels = granted_labels(observation, Knowledge(grant=Grant(labels="inferred")))
            assert labels is not None
        matching = Matching(observation, calls=self.iterations, tensors=self.tensors)
        drawing = Drawing(
            self.prior,
            observation.num_images,
            observation.model,
            features=None if features is None else _scaled(features),
            width=self.width,
            rate=self.learning_rate,
            iterations=self.iterations,
            seed=seed,
            rng=rng,
            device=matching.device,
        )
        wanted = None
        if features is not None and self.features != "none":
            wanted = Features(features, self.features)
        return Inversion(
            loss=torch.full((), torch.inf, device=matching.device),
            matching=matching,
            drawing=drawing,
            labels=labels,
            prior=ForwardPrior(
                observation,
                knowledge,
                wanted,
                feature_weight=self.feature_weight,
                batch_norm=self.batch_norm,
            ),
            distance=reweighted_cosine(matching.counts) if self.reweighted else cosine_distance,
            recovered=recovered,
            best=drawing.draw().detach().clone(),
            best_loss=torch.full((), torch.inf, device=matching.device),
        )

    def step(self, state: Inversion) -> Inversion:
        """Takes a step of Adam; pixels stay valid."""
        drawn = state.drawing.draw()
        images = drawn.detach()
        candidate = Candidate(images, state.labels, None)
        loss, (slope,) = regularized(
            state.matching, candidate, state.distance, self.total_variation
        )
        known, known_slope = state.prior(images)
        state.loss, slope = loss + known, slope + known_slope
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best = torch.where(better, images, state.best)
        state.drawing.step(drawn, slope)
        state.iteration += 1
        return state

    def postprocess(self, state: Inversion) -> Reconstruction:
        """Returns the iterate of least own loss."""
        return Reconstruction(
            images=state.matching.pixels(state.best),
            labels=state.labels,
            features=state.recovered.features if state.recovered else None,
            features_by=state.recovered.features_by if state.recovered else None,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )


def _scaled(features: Tensor) -> Tensor:
    """Scales features to entries of about 1, as inputs of a network should have."""
    return F.normalize(features, dim=1) * math.sqrt(features.shape[1])
