"""A deep body's images and what goes into each of its stages, descended together.

Through a deep body, images lead far away (`peeling`); and stage by stage, what a stage's gradient
leaves open is passed on to the one before, the more the more noise there is. Here everything is
open at once: images and the maps between stages are variables of their own, a map need not be what
the stage before makes of its inputs, and that it should be costs more and more, until images alone
explain the update (the method of auxiliary coordinates of Carreira-Perpiñán and Wang, Distributed
Optimization of Deeply Nested Systems, AISTATS 2014, for inputs in place of weights). Error signals
run back through all stages at the present maps.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.fast_autograd._tape import Tape, pays
from fedsim_attacks.gradient_matching._schedules import half_cosine
from fedsim_attacks.images_from_features._body import relaid
from fedsim_attacks.images_from_features._body_gradient import Misfit
from fedsim_attacks.images_from_features._later_steps import LaterSteps
from fedsim_attacks.images_from_features._part_update import PartUpdate, nonzero_energy
from fedsim_attacks.images_from_features._signals import Signals
from fedsim_attacks.images_from_features._stages import StagedBody

_SHARE = 0.2
"""First step size of a map, over how far it is from what the stage before makes of its inputs."""
_FINAL = 0.005
"""Step size at the end, over that of the beginning."""
_LOOSE = 0.03
"""What a relative squared distance of maps costs at first, in shares of the update's energy."""
_TIGHT = 100.0
"""And at the end, without noise: with it less, by the square root of what is not noise. Tighter
maps carry the noise of all stages into the images, looser ones each fit that of their own."""
_TIGHT_APPROXIMATE = 10.0
"""Where an update of several steps is taken for one gradient."""
_FAR, _CLEAR = 1.5, 3.0
"""How far maps are from right that nothing is known of, in units of their size: where noise hides
most of the update, steps are to be shorter, by the fourth root of what is not noise."""
LEAST_CLEAR = 1e-3
"""Share of the update that is not noise, at least: less cannot be told from none."""


@final
class Relaxation:
    """The misfit of images, and of maps that every call updates."""

    def __init__(
        self,
        observation: Observation,
        staged: StagedBody,
        features: Tensor,
        known: Signals,
        images: Tensor,
        maps: list[Tensor],
        *,
        noise: float,
        later: LaterSteps | None,
        steps: int,
    ) -> None:
        """Prepares the maps.

        Args:
            observation: what the server saw, as one gradient.
            staged: the body.
            features: (N, d), of the images.
            known: what features tell of their images.
            images: normalized (N, C, H, W), to start from.
            maps: inputs of all stages but the first, up to a factor for each image; without any,
                those that `images` lead to.
            noise: share of the body's update that is noise.
            later: of an update of several steps, taken for one.
            steps: calls that there are to be.
        """
        clear = max(1 - noise, LEAST_CLEAR)
        self.final_weight = (_TIGHT if later is None else _TIGHT_APPROXIMATE) * math.sqrt(clear)
        """What a relative squared distance of maps costs at the end."""
        self._staged, self._features, self._errors = staged, features, known.errors
        self._later = later
        self._updates = [
            PartUpdate(
                observation, staged.body, stage.part, known.scale, approximate=later is not None
            )
            for stage in staged.stages
        ]
        self._energy = nonzero_energy(torch.stack([each.energy for each in self._updates]).sum())
        self._done, self._steps = 0, steps
        # A tape would go on as before a correction.
        replayed = pays(steps, features.device) and later is None
        self._slopes = Tape(self._differentiate) if replayed else self._differentiate
        self.maps, distances = self._initial_maps(images, maps, min(_FAR, _CLEAR * clear**0.25))
        self.step_size = _SHARE * distances[0]
        """Of images at first, as of normalized pixels."""
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
        weight = images.new_tensor(_LOOSE * (self.final_weight / _LOOSE) ** done)
        update, distance, slope, *slopes = self._slopes(
            weight, images, *(each.detach() for each in self.maps)
        )
        residuals = half_cosine(done, _FINAL)
        for each, of, group, size in zip(
            self.maps, slopes, self._adam.param_groups, self._sizes, strict=True
        ):
            each.grad = of
            group["lr"] = size * residuals
        self._adam.step()
        for each, stage in zip(self.maps, self._staged.stages[1:], strict=True):
            if stage.positive:
                each.detach().clamp_(min=0)
        self._done += 1
        return Misfit(update, distance, slope, target_changed=corrected)

    def _differentiate(self, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Computes both misfits (0-d) at all stages' `inputs`, and the slopes of their sum there.

        The distance of maps counts `weight` (0-d) times.
        """
        images, *maps = inputs
        variables = [relaid(images), *(each.detach().clone() for each in maps)]
        for each in variables:
            each.requires_grad_()
        with torch.enable_grad():
            update, distance = self._misfits(variables)
            slopes = torch.autograd.grad(update + weight * distance, variables)
        return update.detach(), distance.detach(), *(each.contiguous() for each in slopes)

    def _initial_maps(
        self, images: Tensor, maps: list[Tensor], unknown_distance: float
    ) -> tuple[list[Tensor], list[float]]:
        """Prepares maps to start from, and how far each is from what the stage before makes."""
        if not maps:
            between = self._staged.maps(images)[1:-1]
            return [each.clone().requires_grad_() for each in between], [unknown_distance] * len(
                between
            )
        entering, initial, distances = images, [], []
        for stage, each in zip(self._staged.stages, maps, strict=False):
            with torch.no_grad():
                outputs_made = stage.part.function(entering)
            along = (outputs_made * each).flatten(1).sum(1) / each.flatten(1).square().sum(1)
            entering = each * along.view(-1, *[1] * (each.ndim - 1))
            initial.append(entering.clone().requires_grad_())
            distances.append(float(_distance(outputs_made, entering).sqrt()))
        return initial, distances

    def _misfits(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the misfits of the update and of what stages make of their `inputs` (0-d)."""
        outputs, errors = self._features, self._errors
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for i, stage in reversed(list(enumerate(self._staged.stages))):
            # The accelerated layers compute no gradient of a leaf.
            entering = inputs[i].clone() if i else inputs[i]
            outputs_made = stage.part.function(entering)
            parameters = [parameter for _, parameter in stage.part.parameters]
            gradient = torch.autograd.grad(
                (outputs_made.flatten(1) * errors.flatten(1)).sum(),
                [*parameters, entering] if i else parameters,
                create_graph=True,
            )
            residuals += self._updates[i].compared(gradient[: len(parameters)])[0]
            distances.append(_distance(outputs_made, outputs))
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
