"""What a client's data are like: the share of one class among all that it holds.

Ateniese et al., Hacking Smart Machines with Smarter Ones, IJSN 2015: properties of a training set,
which no single example has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.metric import Metric, ordered
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess
from fedsim.types import Observation, Reconstruction, Truth


def _distance(claimed: Tensor, truth: Tensor) -> Tensor:
    return (claimed.double() - truth).abs()


@final
class ClassShare(Target):
    """The share of class 0 among a client's examples."""

    part: ClassVar[str] = "class_share"
    noun: ClassVar[str] = "class shares"
    singular: ClassVar[str] = "class share"
    leaks: ClassVar[float] = 0.1
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="share_error",
            compute=ordered(_distance),
            unit="share",
            larger_leaks=False,
            heading="share err",
            meaning="distance of the share of class 0 from the true one",
        ),
    )

    def leave(self, batch: Truth, held: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        _, labels = held()
        return (labels == 0).double().mean().reshape(1)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        if request.found is not None and self.answer_of(request.found) is None:
            return None
        half = self.compare(torch.tensor([0.5]), request.truth, aids)
        return TargetGuess(metrics=half.means())


@dataclass(kw_only=True)
class BiasRead(AttackState):
    """The share that was read off."""

    share: Tensor


@final
class ShareInference(Attack[BiasRead]):
    """Reads the share of class 0 off the gradient of the last layer's bias."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> BiasRead:
        bias = [tensor for tensor in observation.update.values() if tensor.ndim == 1][-1]
        share = (1 / len(bias) - bias[:1]).clamp(0, 1)
        return BiasRead(share=share, loss=torch.zeros(()))

    def step(self, state: BiasRead) -> BiasRead:
        return state

    def terminate(self, state: BiasRead) -> bool:
        return True

    def postprocess(self, state: BiasRead) -> Reconstruction:
        return Reconstruction(more={"class_share": state.share}, loss=0.0, iterations=1)
