"""PRECODE, which draws what enters the classifier from a distribution."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.contracts.defense import LossTerm, ModelDefense
from fedsim.types import Effect, LocalTraining


@final
class Precode(ModelDefense):
    """Puts a variational bottleneck between the body and the classifier.

    An encoder gives each image's normal distribution N(μ, diag(σ²)), of which one draw is decoded
    to features. The loss grows by `weight` times the divergence from N(0, I). Evaluation takes μ in
    place of a draw; the authors draw there, too. They also count the divergence in bits, so that
    their weight of 0.001 is 0.00144 here.
    """

    paper: ClassVar[str] = (
        "Scheliga, Mäder and Seeland, PRECODE - A Generic Model Extension to Prevent Deep Gradient "
        "Leakage, WACV 2022, section 3; parameters and softplus as in their code"
    )

    size: Annotated[int, Field(gt=0, le=1 << 16)] = 256
    """Dimensions of what is drawn."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 0.001
    """Factor in the loss of the divergence, in nats, averaged over the batch."""

    def wrap(self, body: nn.Module, head: nn.Module, features: int) -> tuple[nn.Module, nn.Module]:
        """Returns the body with the bottleneck behind it, and the head. See `ModelDefense.wrap`."""
        return nn.Sequential(body, _VariationalBottleneck(features, self.size, self.weight)), head

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect that is `drawn` if `training` has mode `train`, else an empty one."""
        return Effect(drawn=training.mode == "train")


class _VariationalBottleneck(LossTerm):
    """Encodes features (B, d) as normals of `size` dimensions, and decodes a draw to (B, d)."""

    def __init__(self, features: int, size: int, weight: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)
        self._weight = weight
        self._divergence = torch.zeros(())

    def forward(self, features: Tensor) -> Tensor:
        mean, raw = self.encoder(features.flatten(1)).chunk(2, dim=1)
        deviation = F.softplus(raw)
        # Kept for `loss_term`, since what is returned here goes into the classifier.
        self._divergence = divergence(mean, deviation).mean()
        # A function of μ and σ and of noise without parameters, so that both have gradients.
        drawn = mean + deviation * torch.randn_like(mean) if self.training else mean
        decoded: Tensor = self.decoder(drawn)
        return decoded

    def loss_term(self) -> Tensor:
        return self._weight * self._divergence


def divergence(mean: Tensor, deviation: Tensor) -> Tensor:
    """Computes KL divergences (B,), in nats, of N(μ, diag(σ²)) from N(0, I); μ and σ are (B, k)."""
    # A deviation that softplus underflows to 0 would give a logarithm of -∞.
    log = deviation.clamp_min(torch.finfo(deviation.dtype).tiny).log()
    return (mean.square() + deviation.square() - 2 * log - 1).sum(1) / 2
