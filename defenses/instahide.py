"""InstaHide: training on means of several images whose signs are flipped at random."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedsim.contracts.defense import normal
from fedsim.rng import signs
from fedsim.types import Effect, InputSpec, LocalTraining, Mixture
from fedsim_defenses.changed_batch import BatchDefense
from fedsim_defenses.mixup import mix, permutation

_ROOM = 1.25
"""Least `largest` times `images`: nearer to 1, hardly any draw of coefficients is taken."""


@final
class InstaHide(BatchDefense):
    """Trains on weighted means of `images` of a batch's images, each entry with a random sign.

    The weights are magnitudes of normal draws over their sum, drawn again where one exceeds
    `largest`. Inputs are made anew in each step. This is "inside" InstaHide, whose images are all
    private, as in the authors' code `train_inside.py`; it mixes within a batch.
    """

    paper: ClassVar[str] = (
        "Huang, Song, Li and Arora, InstaHide: Instance-hiding Schemes for Private Distributed "
        "Learning, ICML 2020, section 3"
    )

    images: Annotated[int, Field(ge=1, le=64)] = 4
    """k, the number of images in a mean."""
    largest: Annotated[float, Field(gt=0, le=1)] = 0.65
    """Upper bound on a weight, at least 1.25 / `images`; unused if there is one image."""

    @model_validator(mode="after")
    def _leave_room(self) -> Self:
        if self.images > 1 and self.largest * self.images < _ROOM:
            raise ValueError(
                f"expected largest >= {_ROOM / self.images:.3g}, which is {_ROOM} over images, got "
                f"{self.largest}: coefficients sum to 1, and others are hardly ever drawn"
            )
        return self

    def change(
        self, images: Tensor, labels: Tensor, spec: InputSpec, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns signed means of images, and means of labels. See `BatchDefense.change`."""
        count = len(images)
        weights = self._draw_weights(count, rng)
        # Each image is the first of one mean, so that none is left out of training.
        partners = [torch.arange(count)]
        partners += [permutation(count, rng) for _ in range(self.images - 1)]
        chosen = torch.stack(partners, 1)
        flipped = signs(images.shape, rng).to(images)
        return flipped * mix(images, weights, chosen), mix(labels, weights, chosen)

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect whose `batch` is a mean of `images` images, with signs."""
        return Effect(batch=(Mixture(images=self.images, signs=True),))

    def _draw_weights(self, count: int, rng: torch.Generator) -> Tensor:
        weights = torch.ones(count, self.images)
        redrawn = torch.ones(count, dtype=torch.bool)
        while bool(redrawn.any()):
            drawn = normal((int(redrawn.sum()), self.images), rng).abs()
            # Only refused rows are drawn again, so that an accepted one is never looked at twice.
            weights[redrawn] = drawn / drawn.sum(1, keepdim=True)
            redrawn = (weights > self.largest).any(1) & (self.images > 1)
        return weights
