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
from fedsim_attacks.images_from_features._body_gradient import PartGradient
from fedsim_attacks.images_from_features._signals import Signals
from fedsim_attacks.images_from_features._stages import Stage, StagedBody

_STEP = 0.2
"""Of Adam, in units of the root mean square of what goes into a stage."""
_FINAL = 0.002
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
        features: Tensor,
        known: Signals,
        rng: torch.Generator,
        *,
        steps: int,
    ) -> None:
        """Begins with the last stage.

        Args:
            observation: what the server saw.
            staged: the body.
            features: (N, d), of the images.
            known: what features tell of their images.
            rng: of the inputs to start at.
            steps: of Adam, of each stage.
        """
        self._rng, self._observation, self._staged = rng, observation, staged
        self._remaining = staged.stages[1:]
        self._scale, self._steps = known.scale, steps
        self._outputs, self._errors, self._unscaled = features, known.errors, False
        self.maps: list[Tensor] = []
        """Inputs (N, ...) of each of the stages peeled so far, in the order of the stages."""
        self._begin_stage()

    @property
    def unexplained(self) -> float:
        """The least loss of the stage that was peeled last, in shares of its energies."""
        return float(self._best_loss)

    def step(self) -> Tensor:
        """Takes as many steps of Adam as there are stages to peel; returns the last loss (0-d)."""
        for _ in self._staged.stages[1:]:
            if self._remaining:
                self._descend()
        return self._loss

    def images(self, *, weight: float, calls: int) -> PartGradient:
        """Poses the problem of the first stage, after `steps` calls of `step`."""
        self._staged.narrow(0)
        return self._problem(self._staged.stages[0], weight, calls)

    def _problem(self, stage: Stage, weight: float, calls: int) -> PartGradient:
        return PartGradient(
            self._observation,
            self._staged.body,
            stage.part,
            self._outputs,
            self._errors,
            scale=self._scale,
            weight=weight,
            calls=calls,
            unscaled=self._unscaled,
        )

    def _begin_stage(self) -> None:
        """Poses the problem of the next stage to peel."""
        if not self._remaining:
            return
        stage = self._remaining[-1]
        self._gradient = self._problem(stage, 1.0, self._steps)
        # Maps of random images are too much alike to start from.
        start = _START * stage.size * torch.randn(stage.shape, generator=self._rng)
        self._inputs = (start.abs() if stage.positive else start).to(self._outputs.device)
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
        group["lr"] = _STEP * stage.size * half_cosine(self._done / self._steps, _FINAL)
        self._inputs.grad = misfit.slope
        self._adam.step()
        if stage.positive:
            self._inputs.clamp_(min=0)
        self._done += 1
        if self._done == self._steps:
            self._outputs, self._errors = self._gradient.pulled_back(self._best)
            self.maps.insert(0, self._outputs)
            self._unscaled = True
            self._remaining.pop()
            self._begin_stage()
