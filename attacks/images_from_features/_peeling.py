"""A body peeled from its features down: stage by stage, what went into it.

A descent over images through a deep body meets the jumps of all its layers at once, and ends far
away. One stage (`stages`) has a few; its outputs and error signals are known from the stage after
it, and what goes into it is found to a few percent or better. Its own error signals follow, and so
the stage before is posed, down to the images.

Behind a norm layer, what goes in is known up to a factor for each image; the stage before tells
that too, as it makes outputs of one size (Zhu and Blaschko, R-GAP, ICLR 2021, peel layers of one
image by linear systems; here there are batches, norm layers and shortcuts).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.gradient_matching._schedules import half_cosine
from fedsim_attacks.images_from_features._body_gradient import PartGradient, Signals
from fedsim_attacks.images_from_features._stages import Stage, StagedBody

_STEP = 0.2
"""Of Adam, in units of the root mean square of what goes into a stage."""
_FINAL = 0.002
"""Step size at the end, over that of the beginning."""
_START = 0.5
"""Size of random inputs to start at, over that of random images' maps."""


@final
class Peeling:
    """Descends over what goes into the last stage, then the one before, down to the second."""

    def __init__(
        self,
        observation: Observation,
        staged: StagedBody,
        features: Tensor,
        known: Signals,
        rng: torch.Generator,
        *,
        steps: int,
    ) -> None:
        """For images of `features` (N, d); each stage takes `steps` steps of Adam."""
        self._rng, self._observation, self._staged = rng, observation, staged
        self._left = staged.stages[1:]
        self._scale, self._steps = known.scale, steps
        self._outputs, self._errors, self._free = features, known.errors, False
        self.maps: list[Tensor] = []
        """What went into each of the stages peeled so far, the first of them first (N, ...)."""
        self._enter()

    @property
    def unexplained(self) -> float:
        """The least loss of the stage that was peeled last: shares of energy of what it shows."""
        return float(self._best_loss)

    def step(self) -> Tensor:
        """As many steps of Adam as there are stages to peel; the loss (0-d) of the last one."""
        for _ in self._staged.stages[1:]:
            if self._left:
                self._descend()
        return self._loss

    def images(self, *, weight: float, calls: int) -> PartGradient:
        """Of images, from what the peeled stages tell of them; after `steps` calls of `step`."""
        self._staged.narrow(0)
        return self._posed(self._staged.stages[0], weight, calls)

    def _posed(self, stage: Stage, weight: float, calls: int) -> PartGradient:
        return PartGradient(
            self._observation,
            self._staged.body,
            stage.part,
            self._outputs,
            self._errors,
            scale=self._scale,
            weight=weight,
            calls=calls,
            free=self._free,
        )

    def _enter(self) -> None:
        """Pose the next stage to peel."""
        if not self._left:
            return
        stage = self._left[-1]
        self._gradient = self._posed(stage, 1.0, self._steps)
        # Maps of random images are too much alike to start from.
        start = _START * stage.size * torch.randn(stage.shape, generator=self._rng)
        self._inputs = (start.abs() if stage.positive else start).to(self._outputs.device)
        self._adam = torch.optim.Adam([self._inputs], betas=(0.9, 0.99), fused=True)
        self._taken, self._best = 0, self._inputs.clone()
        self._best_loss = self._inputs.new_full((), torch.inf)

    def _descend(self) -> None:
        stage = self._left[-1]
        self._staged.narrow(self._taken / self._steps)
        misfit = self._gradient(self._inputs)
        self._loss = misfit.update + misfit.features
        better = self._loss < self._best_loss
        self._best_loss = torch.where(better, self._loss, self._best_loss)
        self._best = torch.where(better, self._inputs, self._best)
        (group,) = self._adam.param_groups
        group["lr"] = _STEP * stage.size * half_cosine(self._taken / self._steps, _FINAL)
        self._inputs.grad = misfit.slope
        self._adam.step()
        if stage.positive:
            self._inputs.clamp_(min=0)
        self._taken += 1
        if self._taken == self._steps:
            self._outputs, self._errors = self._gradient.pulled_back(self._best)
            self.maps.insert(0, self._outputs)
            self._free = True
            self._left.pop()
            self._enter()
