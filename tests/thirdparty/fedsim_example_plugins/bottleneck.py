"""Scheliga, Mäder and Seeland, PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage,
WACV 2022, section 3: a variational bottleneck in front of the classifier.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.contracts.defense import LossTerm, ModelDefense
from fedsim.types import Effect, LocalTraining


@final
class Bottleneck(ModelDefense):
    """Draws what enters the classifier from a normal distribution of few dimensions."""

    paper: ClassVar[str] = "Scheliga et al., PRECODE, WACV 2022, section 3"

    size: Annotated[int, Field(gt=0, le=4096)] = 16
    """Dimensions k of the bottleneck."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 0.001
    """Factor of the divergence from N(0, I) in the loss."""

    def wrap(self, body: nn.Module, head: nn.Module, features: int) -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(body, _Layer(features, self.size, self.weight)), head

    def effect(self, training: LocalTraining) -> Effect:
        return Effect(drawn=training.mode == "train")


class _Layer(LossTerm):
    def __init__(self, features: int, size: int, weight: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)
        self.weight = weight
        self._divergence = torch.zeros(())

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encoder(features.flatten(1)).chunk(2, dim=1)
        each = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        self._divergence = each.mean()
        drawn = torch.randn_like(mean) * (log_variance / 2).exp() if self.training else 0
        decoded: Tensor = self.decoder(mean + drawn)
        return decoded

    def loss_term(self) -> Tensor:
        return self.weight * self._divergence
