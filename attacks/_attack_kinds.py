"""Kinds of attacks by how they come to an end: at once, or after so many iterations."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Generic, TypeVar, final

import torch
from pydantic import Field

from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction

S = TypeVar("S", bound=AttackState)


@dataclass(kw_only=True)
class Answered(AttackState):
    """The state of an attack that has its answer from the start."""

    answer: Reconstruction


class DirectAttack(Attack[Answered]):
    """Computes its answer in closed form, without iterations."""

    on_processor: ClassVar[bool] = True

    @abstractmethod
    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Computes the answer.

        Raises:
            AttackFailed: nothing can be recovered from this observation, with the reason.
        """

    @final
    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Answered:
        answer = self.reconstruct(observation, knowledge, rng)
        return Answered(answer=answer, loss=torch.tensor(answer.loss))

    @final
    def step(self, state: Answered) -> Answered:
        return state

    @final
    def terminate(self, state: Answered) -> bool:
        return True

    @final
    def postprocess(self, state: Answered) -> Reconstruction:
        return state.answer

    @final
    def total(self) -> int:
        return 0


class IterativeAttack(Attack[S], Generic[S]):
    """Ends after `iterations`, unless it says otherwise."""

    iterations: Annotated[int, Field(ge=1)]

    def terminate(self, state: S) -> bool:
        return state.iteration >= self.iterations

    def total(self) -> int:
        return self.iterations
