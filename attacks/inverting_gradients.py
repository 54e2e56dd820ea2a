"""Inverting Gradients: cosine distance, total variation and signed Adam.

Geiping, Bauermeister, Dröge and Moeller, "Inverting Gradients - How easy is it to break privacy in
federated learning?", NeurIPS 2020, equation (4) and section 6; step size and decay as in their
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.adversary import Attack, AttackState
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.contrast import exposed
from fedsim_attacks.matching import (
    Candidate,
    Distance,
    Matching,
    cosine_distance,
    granted_labels,
)

_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)


@dataclass(kw_only=True)
class Inversion(AttackState):
    """The candidate, its optimizer, and the best images so far by own loss."""

    matching: Matching
    candidate: Candidate
    optimizer: torch.optim.Adam
    schedule: torch.optim.lr_scheduler.MultiStepLR
    best_images: Tensor
    best_labels: Tensor
    best_loss: Tensor


@final
class InvertingGradients(Attack[Inversion]):
    """Matches the direction of the update: cosine distance, total variation, signed Adam.

    Images start at N(0, 1) and stay valid pixels. Labels are taken as the threat model grants them;
    if it grants none, soft labels are optimized with the images.
    """

    paper: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020, equation (4)"

    iterations: Annotated[int, Field(ge=1)] = 4800
    """Signed steps."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """Of Adam, in units of normalized pixels; divided by 10 at 3/8, 5/8 and 7/8 of them."""
    total_variation: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the total variation, the mean absolute difference of neighbouring pixels."""
    stretched: bool = False
    """Whether each image is finally multiplied by what makes it fill the valid pixels. Behind group
    norm an update hardly tells contrast, and total variation takes it away. Not the authors'."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Inversion:
        """Random images; labels known, inferred or soft."""
        matching = Matching(observation, calls=self.iterations)
        candidate = matching.random_candidate(granted_labels(observation, knowledge), rng)
        optimizer = torch.optim.Adam(candidate.variables, lr=self.step_size, fused=True)
        return Inversion(
            loss=torch.full((), torch.inf, device=matching.device),
            matching=matching,
            candidate=candidate,
            optimizer=optimizer,
            schedule=decayed(optimizer, self.iterations),
            best_images=candidate.images.detach().clone(),
            best_labels=candidate.hard_labels(),
            best_loss=torch.full((), torch.inf, device=matching.device),
        )

    def step(self, state: Inversion) -> Inversion:
        """One signed step of Adam, projected onto valid pixels."""
        matching, candidate = state.matching, state.candidate
        images = candidate.images.detach()
        state.loss, (slope, *rest) = regularized(
            matching, candidate, cosine_distance, self.total_variation
        )
        better = state.loss < state.best_loss
        state.best_loss = torch.where(better, state.loss, state.best_loss)
        state.best_images = torch.where(better, images, state.best_images)
        state.best_labels = torch.where(better, candidate.hard_labels(), state.best_labels)
        candidate.images.grad = slope.sign_()
        if candidate.logits is not None:
            (candidate.logits.grad,) = rest
        state.optimizer.step()
        state.schedule.step()
        images.clamp_(*matching.box)
        state.iteration += 1
        return state

    def terminate(self, state: Inversion) -> bool:
        """After `iterations`."""
        return state.iteration >= self.iterations

    def postprocess(self, state: Inversion) -> Reconstruction:
        """The iterate of least own loss, `stretched` if asked for."""
        images, box = state.best_images, state.matching.box
        return Reconstruction(
            images=state.matching.pixels(exposed(images, box) if self.stretched else images),
            labels=state.best_labels,
            loss=float(state.best_loss),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`."""
        return self.iterations


def decayed(optimizer: torch.optim.Adam, iterations: int) -> torch.optim.lr_scheduler.MultiStepLR:
    """Divides the step size by 10 at 3/8, 5/8 and 7/8 of `iterations`."""
    milestones = [int(iterations * fraction) for fraction in _DECAY_AT]
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)


def regularized(
    matching: Matching, candidate: Candidate, distance: Distance, weight: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Distance + `weight` times the total variation (0-d), and its gradients in the variables."""
    value, (slope, *rest) = matching.differentiate(candidate, distance)
    variation, variation_slope = total_variation(candidate.images.detach())
    slope = slope.add_(variation_slope, alpha=weight)
    return value + weight * variation, (slope, *rest)


def total_variation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute difference of vertical plus of horizontal neighbours, and its gradient."""
    slope = torch.zeros_like(images)
    for difference, later, earlier in (
        (images[:, :, 1:] - images[:, :, :-1], slope[:, :, 1:], slope[:, :, :-1]),
        (images[..., 1:] - images[..., :-1], slope[..., 1:], slope[..., :-1]),
    ):
        sign = difference.sign_().div_(max(1, difference.numel()))
        later += sign
        earlier -= sign
    # It scales with the images: by Euler's theorem it is the product with its own gradient.
    return torch.dot(slope.flatten(), images.flatten()), slope
