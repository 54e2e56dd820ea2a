"""A defense of a third party that alters the model keeps to the contract of its kind."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.contracts.defense import LossTerm, ModelDefense
from fedsim.testing import ModelDefenseContract
from fedsim.types import Effect, LocalTraining


class Narrow(ModelDefense):
    """Puts a linear bottleneck between body and head, with a penalty on what passes it."""

    paper: ClassVar[str] = "After Scheliga et al., PRECODE, WACV 2022, without its random draws"

    size: Annotated[int, Field(gt=0)] = 16
    """Numbers that pass."""
    weight: Annotated[float, Field(ge=0)] = 0.001
    """Factor of their mean square in the loss."""

    def wrap(self, body: nn.Module, head: nn.Module, features: int) -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(body, Waist(features, self.size, self.weight)), head

    def effect(self, training: LocalTraining) -> Effect:
        return Effect()


class Waist(LossTerm):
    def __init__(self, features: int, size: int, weight: float) -> None:
        super().__init__()
        self.narrow, self.widen = nn.Linear(features, size), nn.Linear(size, features)
        self.weight, self.charge = weight, torch.zeros(())

    def forward(self, features: Tensor) -> Tensor:
        passing = self.narrow(features.flatten(1))
        self.charge = passing.square().mean()
        widened: Tensor = self.widen(passing)
        return widened

    def loss_term(self) -> Tensor:
        return self.weight * self.charge


class TestNarrow(ModelDefenseContract):
    def make(self) -> Narrow:
        return Narrow(size=2, weight=0.1)
