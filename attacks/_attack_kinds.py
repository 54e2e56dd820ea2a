"""Kinds of attacks by when they end, and the contract of solvers that recover features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Generic, TypeVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction

S = TypeVar("S", bound=AttackState)


@dataclass(kw_only=True)
class _Answered(AttackState):
    answer: Reconstruction


class DirectAttack(Attack[_Answered]):
    """Base of attacks in closed form, of tensors on the CPU if `on_processor` is True."""

    on_processor: ClassVar[bool] = True

    @abstractmethod
    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Computes what can be recovered, and the loss that remains; AttackFailed of nothing."""
        # The stream is on the CPU: what it draws is moved to the observation's device.

    @final
    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _Answered:
        answer = self.reconstruct(observation, knowledge, rng)
        return _Answered(answer=answer, loss=torch.tensor(answer.loss))

    @final
    def step(self, state: _Answered) -> _Answered:
        return state

    @final
    def terminate(self, state: _Answered) -> bool:
        return True

    @final
    def postprocess(self, state: _Answered) -> Reconstruction:
        return state.answer

    @final
    def total(self) -> int:
        return 0


@dataclass(kw_only=True)
class SearchState(AttackState):
    """State of a search that keeps the images of least own loss."""

    loss: Tensor = field(init=False)
    """Loss (0-d) of the present iterate; infinite at first."""
    best: Tensor
    """(N, C, H, W), normalized: the images of least own loss, at first those of the start."""
    best_loss: Tensor = field(init=False)
    """Their loss (0-d); infinite at first."""

    def __post_init__(self) -> None:
        self.loss = self.best_loss = torch.full((), torch.inf, device=self.best.device)

    def keep_best(self, images: Tensor) -> Tensor:
        """Makes `images` the best if the present loss is the least; returns whether it is (0-d)."""
        # Compared without a branch: reading the loss would make a GPU wait in each step.
        better = self.loss < self.best_loss
        self.best_loss = torch.where(better, self.loss, self.best_loss)
        self.best = torch.where(better, images, self.best)
        return better


class IterativeAttack(Attack[S], Generic[S]):
    """Base of attacks that end after `iterations` steps, unless they override `terminate`."""

    iterations: Annotated[int, Field(ge=1)]

    def terminate(self, state: S) -> bool:
        return state.iteration >= self.iterations

    def total(self) -> int:
        return self.iterations


@dataclass(kw_only=True)
class FeatureSolver(AttackState, ABC):
    """Base of solvers that recover a batch's features from its head's gradient, step by step."""

    over: bool = False
    """Whether a step has found that no other would gain anything."""

    @property
    def finished(self) -> bool:
        """Whether another step would gain nothing or exceed the budget; by default `over`."""
        return self.over

    @abstractmethod
    def improve(self) -> None:
        """Takes one step, and adds the iterations of that step to `iteration`."""

    @abstractmethod
    def reconstruction(self) -> Reconstruction:
        """Returns the N images' features (N, d) in their true lengths, and the solver's loss."""

    @property
    def misfit(self) -> Tensor:
        """Distance (0-d) of what the features imply from what was observed; by default `loss`."""
        return self.loss


F = TypeVar("F", bound=FeatureSolver)


class FeatureAttack(Attack[F], Generic[F]):
    """Base of attacks that run the feature solver that `init` makes until it is finished."""

    on_processor: ClassVar[bool] = True

    def step(self, state: F) -> F:
        state.improve()
        return state

    def terminate(self, state: F) -> bool:
        return state.finished

    def postprocess(self, state: F) -> Reconstruction:
        """Returns the features that the solver recovered, and labels if it recovers them."""
        return state.reconstruction()
