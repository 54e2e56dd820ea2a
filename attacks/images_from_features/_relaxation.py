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
from fedsim_attacks.gradient_matching._schedules import half_cosine
from fedsim_attacks.images_from_features._body_gradient import (
    Misfit,
    PartUpdate,
    Signals,
    in_shares_of,
    laid,
)
from fedsim_attacks.images_from_features._later_steps import LaterSteps
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
_TIGHT_ROUGH = 10.0
"""Where an update is only roughly that of one gradient."""
_FAR, _CLEAR = 1.5, 3.0
"""How far maps are from right that nothing is known of, in units of their size: where noise hides
most of the update, steps are to be shorter, by the fourth root of what is not noise."""
LEAST_CLEAR = 1e-3
"""Share of the update that is not noise, at least: less cannot be told from none."""


@final
class Relaxation:
    """The misfit of images, and of maps that every call moves on."""

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
        """For images of `features` (N, d), from normalized `images` (N, C, H, W) on.

        `maps` are what goes into all stages but the first, of each image up to a factor; none
        for what becomes of `images`. A share `noise` of the body's update is noise; where it is
        that of several steps, taken for one, `later` tells what the others add. There are to be
        `steps` calls.
        """
        clear = max(1 - noise, LEAST_CLEAR)
        self.tight = (_TIGHT if later is None else _TIGHT_ROUGH) * math.sqrt(clear)
        """What a relative squared distance of maps costs at the end."""
        self._staged, self._features, self._errors = staged, features, known.errors
        self._later = later
        self._updates = [
            PartUpdate(observation, staged.body, stage.part, known.scale, rough=later is not None)
            for stage in staged.stages
        ]
        self._energy = in_shares_of(torch.stack([each.energy for each in self._updates]).sum())
        self._taken, self._steps = 0, steps
        self.maps, away = self._started(images, maps, min(_FAR, _CLEAR * clear**0.25))
        self.step_size = _SHARE * away[0]
        """Of images at first, as of normalized pixels."""
        sizes = [
            _SHARE * far * stage.size for far, stage in zip(away, staged.stages[1:], strict=True)
        ]
        self._sizes = sizes
        self._adam = torch.optim.Adam([{"params": [each]} for each in self.maps], betas=(0.9, 0.99))

    def __call__(self, images: Tensor) -> Misfit:
        """At normalized `images` (N, C, H, W); `features` is the distance of all maps."""
        done = self._taken / self._steps
        self._staged.narrow(done)
        corrected = self._later is not None and self._later.correct(
            self._updates, images, self._taken, self._steps
        )
        variable = laid(images).requires_grad_()
        with torch.enable_grad():
            update, distance = self._misfits([variable, *self.maps])
            loss = update + _LOOSE * (self.tight / _LOOSE) ** done * distance
            slope, *slopes = torch.autograd.grad(loss, [variable, *self.maps])
        left = half_cosine(done, _FINAL)
        for each, of, group, size in zip(
            self.maps, slopes, self._adam.param_groups, self._sizes, strict=True
        ):
            each.grad = of
            group["lr"] = size * left
        self._adam.step()
        for each, stage in zip(self.maps, self._staged.stages[1:], strict=True):
            if stage.positive:
                each.detach().clamp_(min=0)
        self._taken += 1
        return Misfit(update.detach(), distance.detach(), slope.contiguous(), renewed=corrected)

    def _started(
        self, images: Tensor, maps: list[Tensor], far: float
    ) -> tuple[list[Tensor], list[float]]:
        """Maps to start from, and how far each is from what the stage before makes."""
        if not maps:
            between = self._staged.maps(images)[1:-1]
            return [each.clone().requires_grad_() for each in between], [far] * len(between)
        entering, started, away = images, [], []
        for stage, each in zip(self._staged.stages, maps, strict=False):
            with torch.no_grad():
                made = stage.part.function(entering)
            along = (made * each).flatten(1).sum(1) / each.flatten(1).square().sum(1)
            entering = each * along.view(-1, *[1] * (each.ndim - 1))
            started.append(entering.clone().requires_grad_())
            away.append(float(_distance(made, entering).sqrt()))
        return started, away

    def _misfits(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Of the update, and of what stages make of their `inputs` (both 0-d)."""
        outputs, errors = self._features, self._errors
        left: list[Tensor] = []
        away: list[Tensor] = []
        for i, stage in reversed(list(enumerate(self._staged.stages))):
            # The accelerated layers compute no gradient of a leaf.
            entering = inputs[i].clone() if i else inputs[i]
            made = stage.part.function(entering)
            parameters = [parameter for _, parameter in stage.part.parameters]
            gradient = torch.autograd.grad(
                (made.flatten(1) * errors.flatten(1)).sum(),
                [*parameters, entering] if i else parameters,
                create_graph=True,
            )
            left += self._updates[i].compared(gradient[: len(parameters)])[0]
            away.append(_distance(made, outputs))
            outputs, errors = entering, gradient[-1]
        update = torch.stack([each.square().sum() for each in left]).sum() / self._energy
        return update, torch.stack(away).sum()


def _distance(made: Tensor, outputs: Tensor) -> Tensor:
    """Mean of the images' relative squared distances (0-d)."""
    made, outputs = made.flatten(1), outputs.flatten(1)
    least = torch.finfo(made.dtype).tiny
    return (
        (made - outputs).square().sum(1) / outputs.detach().square().sum(1).clamp_min(least)
    ).mean()
