"""Inverting Gradients: cosine distance, total variation and signed Adam.

Geiping, Bauermeister, Dröge and Moeller, "Inverting Gradients - How easy is it to break privacy in
federated learning?", NeurIPS 2020, equation (4) and section 6; step size and decay as in their
code. Options from what the same authors recommend in their suite breaching 0.1.2, configuration
`modern` (github.com/JonasGeiping/breaching).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import update_noise
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack, SearchState
from fedsim_attacks.gradient_matching._drawing import Adam, decayed_step, half_cosine
from fedsim_attacks.gradient_matching._image_priors import (
    VARIATIONS,
    Variation,
    expose,
    total_variation,
)
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Distance,
    Effects,
    Matching,
    cosine_distance,
    gaussian_distance,
    granted_labels,
    negative_log_likelihood,
)

_WARMUP = 50  # iterations in which the step size rises, before it falls as a cosine


@dataclass(kw_only=True)
class _Inversion(SearchState):
    """The candidate, its optimizer, and the best inputs of a step so far by own loss."""

    matching: Matching
    distance: Distance
    candidate: Candidate
    optimizer: Adam
    best_labels: Tensor  # (N,) int64, or probabilities (N, K) where soft labels are optimized
    rng: torch.Generator


@final
class InvertingGradients(IterativeAttack[_Inversion]):
    """Matches the direction of the update: cosine distance, total variation, signed Adam.

    Images start at N(0, 1) and stay valid pixels. Labels are taken as the threat model grants them;
    if it grants none, soft labels are optimized with the images. Defaults are as in the authors'
    code, but for the weight of the variation. The attack `modern` of breaching is `signs: soft,
    pattern: 4, variation: opponents, decay: cosine`, but for its regularization of features.
    """

    takes_rows: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020, equation (4)"

    iterations: Annotated[int, Field(ge=1)] = 4800
    """Steps of Adam."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """Step size of Adam, in units of normalized pixels."""
    decay: Literal["steps", "cosine"] = "steps"
    """Fall of the step size: divided by 10 at 3/8, 5/8 and 7/8 of the iterations, or as a cosine,
    to 0, after it has risen over the first 50."""
    distance: Literal["cosine", "gaussian", "likelihood"] = "cosine"
    """Distance of updates. `cosine`: 1 - cosine. `gaussian`: 1 - a Gaussian kernel, averaged over
    tensors (Wang et al.). `likelihood`: negative log likelihood per pixel, of an update with
    announced noise (Balunović et al.); `total_variation` is then the prior's: 1 over the expected
    difference of neighbouring pixels, about 4 for photographs."""
    signs: Literal["hard", "soft"] = "hard"
    """Function of a slope g that Adam descends. `hard`: its sign. `soft`: tanh(s g) / s, where s
    falls from 1 to 0."""
    pattern: Annotated[int, Field(ge=1)] | None = None
    """Side in pixels of the random patch that each image starts as a tiling of; default: none."""
    total_variation: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the variation. The authors' command for CIFAR-10 has 0.0001, which makes worse
    images of the bundled photographs (docs/image-reconstruction.md)."""
    variation: Literal["absolute", "opponents"] = "absolute"
    """`absolute`: mean absolute difference of neighbouring pixels. `opponents`: mean length of the
    step to the next pixel, of channels and of the differences between channels."""
    tensors: ComparedTensors = "all"
    """Tensors of the update that are matched: all, or those of the body, that is, all but the
    classifier's head. A planted head has nearly all of the update's energy."""
    effects: Effects = "ignored"
    """Treatment of what a defense changed: ignored, or simulated. `simulated` zeroes and truncates
    alike, fits a model's random draws and copies, compares orthogonal updates by norm and inner
    product, and undoes drawn views and mixtures. Not the authors'."""
    stretched: bool = False
    """Whether each image is finally multiplied by what makes it fill the valid pixels. Behind group
    norm an update hardly tells contrast, and total variation takes it away. Not the authors'."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _Inversion:
        """Draws random images; labels are as granted, or else soft. See `Attack.init`.

        An AttackFailed refuses to tile or stretch rows, and a likelihood without announced noise.
        """
        if observation.model.columns and (self.pattern or self.stretched):
            raise AttackFailed("rows of a table are no pictures: drop pattern and stretched")
        matching = Matching(
            observation, calls=self.iterations, tensors=self.tensors, effects=self.effects
        )
        candidate = matching.random_candidate(granted_labels(observation, knowledge), rng)
        if self.pattern:
            candidate.images.data = tile(candidate.images.data, self.pattern)
        return _Inversion(
            matching=matching,
            distance=self._distance(observation),
            candidate=candidate,
            optimizer=Adam(candidate.variables),
            best=candidate.images.detach().clone(),
            best_labels=candidate.targets().detach(),
            rng=rng,
        )

    def step(self, state: _Inversion) -> _Inversion:
        """Takes a step of Adam along signs, projected onto valid pixels. See `Attack.step`."""
        matching, candidate = state.matching, state.candidate
        images = candidate.images.detach()
        state.loss, (slope, *rest) = regularized(
            matching, candidate, state.distance, self.total_variation, VARIATIONS[self.variation]
        )
        better = state.keep_best(images)
        state.best_labels = torch.where(better, candidate.targets().detach(), state.best_labels)
        if self.signs == "hard":  # as in the authors' code
            slope = slope.sign_()
        else:
            # Soft signs end as plain slopes, as tanh(s g) / s goes to g.
            left = 1 - state.iteration / self.iterations
            slope = (left * slope).tanh_().div_(left)
        state.optimizer.step([slope, *rest], self._rate(state.iteration))
        # `images` is a detached view of the candidate's memory, which is clamped with it.
        images.clamp_(*matching.range)
        state.iteration += 1
        return state

    def postprocess(self, state: _Inversion) -> Reconstruction:
        """Returns `images`, or rows of a table as `records`, of least loss, and their labels."""
        images, labels = state.matching.undo_changes(state.best, state.best_labels, state.rng)
        box = state.matching.box
        entries = state.matching.pixels(expose(images, box) if self.stretched else images)
        return Reconstruction(
            labels=labels.argmax(1) if labels.ndim == 2 else labels,
            loss=float(state.best_loss),
            iterations=state.iteration,
        ).with_parts({"images" if images.ndim == 4 else "records": entries})

    def _distance(self, observation: Observation) -> Distance:
        """Chooses the distance, and makes a likelihood from the noise that is announced."""
        if self.distance != "likelihood":
            return cosine_distance if self.distance == "cosine" else gaussian_distance
        variance = update_noise(observation)
        if not variance:
            raise AttackFailed(
                "no noise of known variance is announced, and without it there is no likelihood: "
                "use distance: cosine"
            )
        pixels = observation.num_images * math.prod(observation.model.input_shape)
        scaled = observation.effect.scaled or observation.effect.scaled_examples
        return negative_log_likelihood(variance, pixels, scaled)

    def _rate(self, done: int) -> float:
        if self.decay == "steps":
            return decayed_step(self.step_size, done, self.iterations)
        rise = min(1.0, (done + 1) / _WARMUP)
        return self.step_size * (rise * half_cosine(done / self.iterations))


def tile(images: Tensor, side: int) -> Tensor:
    """Returns copies of `images` (N, C, H, W), each tiled by its first `side` by `side` pixels."""
    height, width = images.shape[-2:]
    rows, columns = torch.arange(height) % side, torch.arange(width) % side
    return images[:, :, rows][..., columns].contiguous()


def regularized(
    matching: Matching,
    candidate: Candidate,
    distance: Distance,
    weight: float,
    variation: Variation = total_variation,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns distance + `weight` variation (0-d), and its slopes; of rows the distance alone.

    Args:
        matching: The observed update.
        candidate: The batch whose update is compared; slopes are in its `variables`, in order.
        distance: Distance of both updates.
        weight: Factor of the variation.
        variation: Function from images to their variation (0-d) and its gradient in them.
    """
    value, (slope, *rest) = matching.differentiate(candidate, distance)
    if candidate.images.ndim != 4:  # entries of a row that are neighbours are not alike
        return value, (slope, *rest)
    images = candidate.images.detach()
    if matching.changed.signed:
        # Inputs with random signs are not smooth, but their magnitudes are where their images are.
        varies, variation_slope = variation(images.abs())
        variation_slope = variation_slope * images.sign()
    else:
        varies, variation_slope = variation(images)
    slope = slope.add_(variation_slope, alpha=weight)
    return value + weight * varies, (slope, *rest)
