"""GradInversion: several seeds match the gradient together, and are pulled towards their consensus.

Yin, Mallya, Vahdat, Alvarez, Kautz and Molchanov, "See through Gradients: Image Batch Recovery via
GradInversion", CVPR 2021, section 3. Every seed descends their objective, the squared distance of
gradients + α_TV R_TV + α_l2 R_l2 + α_BN R_BN + α_group R_group, by Adam with Langevin noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.gradient_matching._drawing import Adam, half_cosine
from fedsim_attacks.gradient_matching._image_priors import ForwardPrior, total_variation
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    ComparedTensors,
    Matching,
    granted_labels,
    squared_distance,
)


@dataclass(kw_only=True)
class _Group(AttackState):
    matching: Matching
    prior: ForwardPrior
    images: Tensor  # (S, N, C, H, W), normalized: the candidates of all seeds
    labels: Tensor | None  # (N,) int64, known or inferred; None where `logits` stand for them
    logits: Tensor | None
    """(N, K) of soft labels, the same for all seeds; None where labels are granted."""
    optimizer: Adam
    rng: torch.Generator


@final
class GradInversion(IterativeAttack[_Group]):
    """Matches the gradient by several batches at once (seeds), held to image priors and their mean.

    Labels are taken as the threat model grants them (inferred ones by `label_inference`, in place
    of the paper's rule, which takes a batch to hold no label twice); if it grants none, soft labels
    are optimized with the images. The batch-norm term is there if the threat model grants
    statistics. The paper aligns the seeds' images by RANSAC-flow, which needs a trained network;
    here by an exact search over whole shifts. Weights are in units of the relative squared
    distance, and of means over pixels where the paper has sums.
    """

    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "Yin et al., See through Gradients (GradInversion), CVPR 2021, section 3"

    iterations: Annotated[int, Field(ge=1)] = 20_000
    """Steps of Adam; each of them differentiates the gradient of every seed. The default is the
    paper's: say which share of it a shorter run has."""
    seeds: Annotated[int, Field(ge=1, le=64)] = 8
    """Number of candidate batches that are optimized jointly."""
    step_size: Annotated[float, Field(gt=0)] = 0.1
    """Step size of Adam, in units of normalized pixels; falls as a cosine, to 0."""
    warmup: Annotated[int, Field(ge=0)] = 50
    """Number of iterations in which the step size rises, linearly."""
    total_variation: Annotated[float, Field(ge=0)] = 0.1
    """α_TV: weight of the mean absolute difference of neighbouring pixels."""
    norm: Annotated[float, Field(ge=0)] = 0.001
    """α_l2: weight of the root mean square of normalized pixels."""
    batch_norm: Annotated[float, Field(ge=0)] = 0.1
    """α_BN: weight of the distance of batch norm's inputs from the granted statistics."""
    group: Annotated[float, Field(ge=0)] = 0.1
    """α_group: weight of the root mean square distance of a seed from the mean of aligned seeds."""
    reach: Annotated[int, Field(ge=0, le=16)] = 1
    """Largest shift by which seeds are aligned, in pixels."""
    noise: Annotated[float, Field(ge=0)] = 0.2
    """α_n: standard deviation of the Langevin noise of a step, in units of its step size."""
    tensors: ComparedTensors = "all"
    """Tensors of the update that are matched: all, or all but the classifier's head (body)."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> _Group:
        """Draws a random batch for each of `seeds`, with labels as granted. See `Attack.init`."""
        calls = self.iterations * self.seeds
        matching = Matching(observation, calls=calls, tensors=self.tensors)
        labels = granted_labels(observation, knowledge)
        starts = [matching.random_candidate(labels, rng) for _ in range(self.seeds)]
        images = torch.stack([start.images.detach() for start in starts])
        logits = starts[0].logits
        return _Group(
            loss=torch.full((), torch.inf, device=matching.device),
            matching=matching,
            prior=ForwardPrior(observation, knowledge, None, batch_norm=self.batch_norm),
            images=images,
            labels=labels,
            logits=logits,
            optimizer=Adam([images] if logits is None else [images, logits]),
            rng=rng,
        )

    def step(self, state: _Group) -> _Group:
        """Takes a noisy step of Adam for all seeds, on valid pixels. See `Attack.step`."""
        evaluated = [self._fidelity(state, one) for one in state.images]
        losses, slopes, logit_slopes = zip(*evaluated, strict=True)
        state.loss = torch.stack(losses).min()
        # Equation 11, whose mean is held fixed within a step.
        pull = _consensus_slope(state.images, _consensus(state.images, self.reach))
        directions = [torch.stack(slopes).add_(pull, alpha=self.group)]
        if state.logits is not None:
            # All seeds share one set of soft labels, whose slope is the seeds' mean.
            directions.append(torch.stack([slope for (slope,) in logit_slopes]).mean(0))
        rate = self._rate(state.iteration)
        state.optimizer.step(directions, rate)
        # Langevin noise is in proportion to the step size, and dies out with it.
        if self.noise:
            drawn = torch.randn(state.images.shape, generator=state.rng)
            state.images.add_(drawn.to(state.images.device), alpha=rate * self.noise)
        state.images.clamp_(*state.matching.box)
        state.iteration += 1
        return state

    def postprocess(self, state: _Group) -> Reconstruction:
        """Returns images and labels of least loss, among all seeds and the mean of aligned ones."""
        # The registered mean may be better than any seed, and is judged by the same loss.
        answers = torch.cat([state.images, _consensus(state.images, self.reach)[None]])
        losses = torch.stack([self._fidelity(state, answer)[0] for answer in answers])
        best = int(losses.nan_to_num(nan=torch.inf).argmin())
        return Reconstruction(
            images=state.matching.pixels(answers[best]),
            labels=Candidate(answers[best], state.labels, state.logits).hard_labels(),
            loss=float(losses[best]),
            iterations=state.iteration,
        )

    def _fidelity(self, state: _Group, images: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Computes a seed's loss without the group's term, its slopes in images and in logits."""
        candidate = Candidate(images, state.labels, state.logits)
        loss, (slope, *logit_slopes) = state.matching.differentiate(candidate, squared_distance)
        variation, variation_slope = total_variation(images)
        size = _root_mean_square(images)
        known, known_slope = state.prior(images)
        loss = loss + self.total_variation * variation + self.norm * size + known
        slope = slope.add(variation_slope, alpha=self.total_variation).add_(known_slope)
        return (
            loss,
            # ∂ rms(x)/∂x = x / (n rms(x)).
            slope.add_(images / (size * images.numel()), alpha=self.norm),
            tuple(logit_slopes),
        )

    def _rate(self, iteration: int) -> float:
        rising = min(1.0, (iteration + 1) / max(1, self.warmup))
        return self.step_size * rising * half_cosine(iteration / self.iterations)


def _consensus(images: Tensor, reach: int) -> Tensor:
    """Averages `images` (S, N, C, H, W) over S seeds, registered to their mean (equation 12)."""
    target = images.mean(0).expand_as(images).flatten(0, 1)
    return _register(images.flatten(0, 1), target, reach).view_as(images).mean(0)


def _consensus_slope(images: Tensor, mean: Tensor) -> Tensor:
    """Computes the gradient of Σ_s rms(x_s - `mean`) in `images` x_s (equation 11)."""
    deviation = images - mean
    return torch.stack([each / (_root_mean_square(each) * each.numel()) for each in deviation])


def _register(images: Tensor, target: Tensor, reach: int) -> Tensor:
    """Shifts each of `images` (N, C, H, W) by up to `reach` pixels, nearest to its `target`."""
    height, width = images.shape[2:]
    padded = F.pad(images, (reach,) * 4, mode="replicate") if reach else images
    best, least = images, (images - target).square().sum((1, 2, 3))
    for down in range(2 * reach + 1):
        for across in range(2 * reach + 1):
            shifted = padded[:, :, down : down + height, across : across + width]
            cost = (shifted - target).square().sum((1, 2, 3))
            # No branch: reading the cost would make a GPU wait.
            best = torch.where((cost < least).view(-1, 1, 1, 1), shifted, best)
            least = torch.minimum(cost, least)
    return best


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt().clamp_min(torch.finfo(values.dtype).tiny)
