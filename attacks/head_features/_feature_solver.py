"""The contract of solvers that recover features, and the attack that runs one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from fedsim.contracts.attack import Attack, AttackState
from fedsim.types import Reconstruction


@dataclass(kw_only=True)
class FeatureSolver(AttackState, ABC):
    """Recovers the features of a batch from its head's gradient, one step after the other."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether another step would gain nothing, or the budget of iterations is spent."""

    @abstractmethod
    def improve(self) -> None:
        """Takes a step, which counts up `iteration` by the iterations that it took."""

    @abstractmethod
    def reconstruction(self) -> Reconstruction:
        """Returns the features (N, d) at their norms, and the solver's own loss."""

    @property
    def misfit(self) -> Tensor:
        """How far the features are from explaining what the solver compares them with (0-d)."""
        return self.loss


S = TypeVar("S", bound=FeatureSolver)


class FeatureAttack(Attack[S], Generic[S]):
    """Runs the solver that its `init` makes until that is finished."""

    on_processor: ClassVar[bool] = True

    def step(self, state: S) -> S:
        state.improve()
        return state

    def terminate(self, state: S) -> bool:
        return state.finished

    def postprocess(self, state: S) -> Reconstruction:
        """Returns what the solver has recovered."""
        return state.reconstruction()
