"""MixUp: training on means of two images and of their labels."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import uniform
from fedsim.types import Effect, InputSpec, LocalTraining, Mixture
from fedsim_defenses.changed_batch import BatchDefense


@final
class MixUp(BatchDefense):
    """Trains on λ x_i + (1 - λ) x_j and the same mean of labels, where j permutes the batch.

    λ is drawn for each step and holds for its batch, as in the authors' code. A batch of one image
    is mixed with itself, so that nothing changes.
    """

    paper: ClassVar[str] = (
        "Zhang, Cisse, Dauphin and Lopez-Paz, mixup: Beyond Empirical Risk Minimization, ICLR "
        "2018, section 2"
    )

    alpha: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """α of Beta(α, α), which λ is drawn from; the authors have 1 for CIFAR-10."""

    def change(
        self, images: Tensor, labels: Tensor, spec: InputSpec, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns means (B, C, H, W) of two images, and of labels. See `BatchDefense.change`."""
        # Imported here: it takes long, and only a step needs it.
        from scipy.special import betaincinv

        # By the inverse distribution function: torch's own Beta takes no generator.
        share = float(betaincinv(self.alpha, self.alpha, float(uniform((1,), rng))))
        weights = torch.tensor([share, 1 - share]).expand(len(images), 2)
        partners = torch.stack([torch.arange(len(images)), permutation(len(images), rng)], 1)
        return mix(images, weights, partners), mix(labels, weights, partners)

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect whose `batch` is a mean of two images. See `BatchDefense.effect`."""
        return Effect(batch=(Mixture(images=2),))


def permutation(count: int, rng: torch.Generator) -> Tensor:
    """Returns the numbers from 0 to `count` - 1 in random order, (`count`,) int64, by `rng`."""
    return uniform((count,), rng).argsort()


def mix(values: Tensor, weights: Tensor, partners: Tensor) -> Tensor:
    """Returns weighted means (B, ...) of `values` (B, ...): the i-th is of those at `partners[i]`.

    `partners` (B, k) are numbers from 0, and rows of `weights` (B, k) sum to 1.
    """
    # One weight for all entries of an image.
    spread = weights.to(values)[(..., *[None] * (values.ndim - 1))]
    mixed: Tensor = (spread * values[partners.to(values.device)]).sum(1)
    return mixed
