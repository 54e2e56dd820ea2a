"""What went into each stage of a deep body: peeled stage by stage, or descended together.

A descent over images through a deep body meets the jumps of all its layers at once, and ends far
away. One stage (`_stages`) has a few; its outputs and error signals are known from the stage after
it, and what goes into it is found to a few percent or better. Its own error signals follow, and so
the stage before is posed, down to the images.

Behind a norm layer, what goes in is known up to a factor for each image; the stage before tells
that too, as it makes outputs of one size (Zhu and Blaschko, R-GAP, ICLR 2021, peel layers of one
image by linear systems; here there are batches, norm layers and shortcuts).

Stage by stage, what a stage's gradient leaves open is passed on to the one before, the more the
more noise there is. `Relaxation` leaves everything open at once: images and the maps between stages
are variables of their own, a map need not be what the stage before makes of its inputs, and that it
should be costs more and more, until images alone explain the update (the method of auxiliary
coordinates of Carreira-Perpiñán and Wang, Distributed Optimization of Deeply Nested Systems,
AISTATS 2014, for inputs in place of weights). Error signals run back through all stages at the
present maps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.fast_autograd._tape import Tape, pays
from fedsim_attacks.gradient_matching._drawing import half_cosine
from fedsim_attacks.images_from_features._body_gradient import (
    LaterSteps,
    Misfit,
    PartGradient,
    PartUpdate,
    StageTarget,
    lay_out,
    nonzero_energy,
)
from fedsim_attacks.images_from_features._stages import Stage, StagedBody

_STEP = 0.2
"""Step size of Adam, in units of the root mean square of what goes into a stage."""
_PEELING_END = 0.002
"""Step size at the end, over that of the beginning."""
_START = 0.5
"""Size of random inputs to start at, over that of random images' maps."""


@final
class StagePeeling:
    """Recovers the inputs of the last stage, then of the one before, down to the second."""

    def __init__(
        self,
        observation: Observation,
        staged: StagedBody,
        target: StageTarget,
        rng: torch.Generator,
        *,
        steps: int,
    ) -> None:
        """Begins with the last stage.

        Args:
            observation: what the server saw.
            staged: the body in stages.
            target: features and their error signals.
            rng: source of the inputs to start at.
            steps: number of steps of Adam in each stage.
        """
        self._rng, self._observation, self._staged = rng, observation, staged
        self._remaining = staged.stages[1:]
        self._steps, self._target = steps, target
        self.maps: list[Tensor] = []
        """Inputs (N, ...) of each of the stages peeled so far, in the order of the stages."""
        self._begin_stage()

    @property
    def unexplained(self) -> float:
        """The least loss of the stage peeled last, relative to its update and outputs.

        It is infinite before the first step of a stage.
        """
        return float(self._best_loss)

    def step(self) -> Tensor:
        """Takes as many steps of Adam as there are stages to peel.

        Returns the loss (0-d) of the last step.
        """
        for _ in self._staged.stages[1:]:
            if self._remaining:
                self._descend()
        return self._loss

    def images(self, *, weight: float, calls: int) -> PartGradient:
        """Returns the problem of the first stage, whose inputs are the images.

        All other stages have to be peeled before. `weight` is that of the outputs' misfit, and
        `calls` is the number of evaluations to come.
        """
        self._staged.narrow(0)
        return self._problem(self._staged.stages[0], weight, calls)

    def _problem(self, stage: Stage, weight: float, calls: int) -> PartGradient:
        return PartGradient(
            self._observation,
            self._staged.body,
            stage.part,
            self._target,
            weight=weight,
            calls=calls,
        )

    def _begin_stage(self) -> None:
        """Poses the problem of the next stage to peel."""
        if not self._remaining:
            return
        stage = self._remaining[-1]
        self._gradient = self._problem(stage, 1.0, self._steps)
        # Maps of random images are too much alike to start from.
        start = _START * stage.size * torch.randn(stage.shape, generator=self._rng)
        self._inputs = (start.abs() if stage.positive else start).to(self._target.outputs.device)
        self._adam = torch.optim.Adam([self._inputs], betas=(0.9, 0.99), fused=True)
        self._done, self._best = 0, self._inputs.clone()
        self._best_loss = self._inputs.new_full((), torch.inf)

    def _descend(self) -> None:
        stage = self._remaining[-1]
        self._staged.narrow(self._done / self._steps)
        misfit = self._gradient(self._inputs)
        self._loss = misfit.update + misfit.features
        better = self._loss < self._best_loss
        self._best_loss = torch.where(better, self._loss, self._best_loss)
        self._best = torch.where(better, self._inputs, self._best)
        (group,) = self._adam.param_groups
        # Adam's steps are as large as its rate: in units of the inputs they suit every stage.
        group["lr"] = _STEP * stage.size * half_cosine(self._done / self._steps, _PEELING_END)
        self._inputs.grad = misfit.slope
        self._adam.step()
        if stage.positive:
            self._inputs.clamp_(min=0)
        self._done += 1
        if self._done == self._steps:
            # The inputs found are the outputs of the stage before, with error signals of their own.
            self._target = self._gradient.pull_back(self._best)
            self.maps.insert(0, self._target.outputs)
            self._remaining.pop()
            self._begin_stage()


_SHARE = 0.2
"""First step size of a map, over its distance from what the stage before makes of its inputs."""
_RELAXATION_END = 0.005
"""Step size at the end, over that of the beginning."""
_LOOSE = 0.03
"""Weight of maps' relative squared distance at first, in shares of the update's energy."""
_TIGHT = 100.0
"""The same at the end, without noise; multiplied by the root of the share without noise. Tighter
maps carry the noise of all stages into the images, looser ones each fit that of their own."""
_TIGHT_APPROXIMATE = 10.0
"""The same where an update of several steps is taken for one gradient."""
_FAR, _CLEAR = 1.5, 3.0
"""Assumed relative error of unknown maps: at most `_FAR`, and `_CLEAR` times the fourth root of the
share that is not noise. Where noise hides most of the update, steps are to be shorter."""
LEAST_CLEAR = 1e-3
"""Share of the update that is not noise, at least: less cannot be told from none."""


@dataclass(frozen=True, eq=False)
class StageInputs:
    """Inputs of all stages, from which a descent over them starts."""

    images: Tensor
    """(N, C, H, W), normalized: inputs of the first stage."""
    maps: list[Tensor]
    """Inputs of all other stages, up to a factor for each image; without any, those that `images`
    lead to."""


@final
class Relaxation:
    """The misfit of images together with the maps between stages, which every call updates.

    A call with normalized images (N, C, H, W) returns their `Misfit`, whose `features` is the
    distance of all maps.
    """

    def __init__(
        self,
        observation: Observation,
        staged: StagedBody,
        target: StageTarget,
        start: StageInputs,
        *,
        noise: float,
        later: LaterSteps | None,
        steps: int,
    ) -> None:
        """Prepares the maps.

        Args:
            observation: what the server saw, as one gradient.
            staged: the body in stages.
            target: features and their error signals.
            start: inputs to start from.
            noise: share of the body's update that is noise, in [0, 1].
            later: what later steps add; None for an update of one step.
            steps: number of calls that there will be.
        """
        clear = max(1 - noise, LEAST_CLEAR)
        self.final_weight = (_TIGHT if later is None else _TIGHT_APPROXIMATE) * math.sqrt(clear)
        """Weight of maps' relative squared distance at the end."""
        self._staged, self._target = staged, target
        self._later = later
        self._updates = [
            PartUpdate(
                observation, staged.body, stage.part, target.scale, approximate=later is not None
            )
            for stage in staged.stages
        ]
        self._energy = nonzero_energy(torch.stack([each.energy for each in self._updates]).sum())
        self._done, self._steps = 0, steps
        # A tape would go on as before a correction.
        replayed = pays(steps, target.outputs.device) and later is None
        self._slopes = Tape(self._differentiate) if replayed else self._differentiate
        self.maps, distances = self._initial_maps(start, min(_FAR, _CLEAR * clear**0.25))
        self.step_size = _SHARE * distances[0]
        """Step size of images at first, in units of normalized pixels."""
        sizes = [
            _SHARE * unknown_distance * stage.size
            for unknown_distance, stage in zip(distances, staged.stages[1:], strict=True)
        ]
        self._sizes = sizes
        self._adam = torch.optim.Adam([{"params": [each]} for each in self.maps], betas=(0.9, 0.99))

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates normalized `images` (N, C, H, W), and takes a step over the maps.

        `features` of the misfit is the distance of all maps.
        """
        done = self._done / self._steps
        self._staged.narrow(done)
        corrected = self._later is not None and self._later.correct(
            self._updates, images, self._done, self._steps
        )
        # Geometric, so that each part of the descent tightens maps by one factor.
        weight = images.new_tensor(_LOOSE * (self.final_weight / _LOOSE) ** done)
        update, distance, slope, *slopes = self._slopes(
            weight, images, *(each.detach() for each in self.maps)
        )
        residuals = half_cosine(done, _RELAXATION_END)
        for each, of, group, size in zip(
            self.maps, slopes, self._adam.param_groups, self._sizes, strict=True
        ):
            each.grad = of
            # Each map has a step of its own, by how far it is from what the stage before makes.
            group["lr"] = size * residuals
        self._adam.step()
        for each, stage in zip(self.maps, self._staged.stages[1:], strict=True):
            if stage.positive:
                each.detach().clamp_(min=0)
        self._done += 1
        return Misfit(update, distance, slope, target_changed=corrected)

    def _differentiate(self, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Computes both misfits (0-d) at all stages' `inputs`, and the slopes of their sum there.

        The distance of maps is multiplied by `weight` (0-d).
        """
        images, *maps = inputs
        variables = [lay_out(images), *(each.detach().clone() for each in maps)]
        for each in variables:
            each.requires_grad_()
        with torch.enable_grad():
            update, distance = self._misfits(variables)
            slopes = torch.autograd.grad(update + weight * distance, variables)
        return update.detach(), distance.detach(), *(each.contiguous() for each in slopes)

    def _initial_maps(
        self, start: StageInputs, unknown_distance: float
    ) -> tuple[list[Tensor], list[float]]:
        """Prepares maps to start from, and how far each is from what the stage before makes."""
        if not start.maps:
            between = self._staged.maps(start.images)[1:-1]
            return [each.clone().requires_grad_() for each in between], [unknown_distance] * len(
                between
            )
        entering, initial, distances = start.images, [], []
        for stage, each in zip(self._staged.stages, start.maps, strict=False):
            with torch.no_grad():
                outputs_made = stage.part.function(entering)
            # Peeling leaves a map a factor for each image, which the stage before tells.
            along = (outputs_made * each).flatten(1).sum(1) / each.flatten(1).square().sum(1)
            entering = each * along.view(-1, *[1] * (each.ndim - 1))
            initial.append(entering.clone().requires_grad_())
            distances.append(float(_distance(outputs_made, entering).sqrt()))
        return initial, distances

    def _misfits(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the misfits of the update and of what stages make of their `inputs` (0-d)."""
        outputs, errors = self._target.outputs, self._target.errors
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for i, stage in reversed(list(enumerate(self._staged.stages))):
            # The accelerated layers compute no gradient of a leaf.
            entering = inputs[i].clone() if i else inputs[i]
            outputs_made = stage.part.function(entering)
            parameters = [parameter for _, parameter in stage.part.parameters]
            # Differentiable, as a stage's error signals depend on the maps of all stages behind it.
            gradient = torch.autograd.grad(
                (outputs_made.flatten(1) * errors.flatten(1)).sum(),
                [*parameters, entering] if i else parameters,
                create_graph=True,
            )
            residuals += self._updates[i].compare(gradient[: len(parameters)])[0]
            distances.append(_distance(outputs_made, outputs))
            # Chain rule: the error signals of what enters this stage are the next target's.
            outputs, errors = entering, gradient[-1]
        update = torch.stack([each.square().sum() for each in residuals]).sum() / self._energy
        return update, torch.stack(distances).sum()


def _distance(outputs_made: Tensor, outputs: Tensor) -> Tensor:
    """Computes the mean of the images' relative squared distances (0-d)."""
    outputs_made, outputs = outputs_made.flatten(1), outputs.flatten(1)
    least = torch.finfo(outputs_made.dtype).tiny
    return (
        (outputs_made - outputs).square().sum(1) / outputs.detach().square().sum(1).clamp_min(least)
    ).mean()
