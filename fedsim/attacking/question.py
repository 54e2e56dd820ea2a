"""What a process that attacks is handed, and what it answers: no truth, and no run's folder.

Whoever asks has taken what is granted out of the truth (`targets`), and scores the answer (`jobs`).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, AttackState, Progress, Solution, solve
from fedsim.contracts.grant import Knowledge
from fedsim.system import processes, threads
from fedsim.types import FedsimError, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class Question:
    """One attack on one observation, or on one row of it."""

    attack: Attack[AttackState]
    observation: Observation
    """As the threat model shows it."""
    knowledge: Knowledge
    seed: int
    restarts: int

    def answer(self, progress: Callable[[Progress], None] | None = None) -> Solution:
        """Run the attack. What it draws from torch's global stream follows from the seed.

        Raises:
            AttackFailed: `solve` raises it.
        """
        with rng.global_stream(self.seed):
            return solve(
                self.attack,
                self.observation,
                self.knowledge,
                self.seed,
                restarts=self.restarts,
                progress=progress,
            )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a question."""

    solution: Solution | None
    """None if the attack failed; its tensors are in CPU memory."""
    reason: str | None
    """Why it failed."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all questions of a process have in common."""

    device: str
    threads: int
    public_images: Tensor | None
    """That every attack is granted."""


def sealed(question: Question) -> bytes:
    """The question as it is sent: public images, which are many, are there already."""
    known = replace(question.knowledge, public_images=None)
    return pickle.dumps(replace(question, knowledge=known))


def opened(answer: bytes) -> Answer:
    """What `answered` returned."""
    found = pickle.loads(answer)  # noqa: S301 - a process that this one started wrote it
    assert isinstance(found, Answer)
    return found


def answered(index: int, question: bytes) -> bytes:
    """In a worker process: the answer to what `sealed` wrote. A failure is a value.

    Progress is told under `index`.
    """
    around = _prepared()
    asked: Question = pickle.loads(question)  # noqa: S301 - this process's parent wrote it
    known = replace(asked.knowledge, public_images=around.public_images)
    asked = replace(
        asked,
        observation=_moved(asked.observation, around.device),
        knowledge=_moved(known, around.device, but=("other_rows", "candidate")),
    )

    def progress(at: Progress) -> None:
        processes.tell((index, at))

    started = time.perf_counter()
    solution, reason = None, None
    try:
        found = asked.answer(progress)
        solution = replace(found, reconstruction=on_cpu(found.reconstruction))
    except Exception as error:  # a third party's attack may raise anything: the row says what
        reason = reason_of(error)
    seconds = time.perf_counter() - started
    return pickle.dumps(Answer(solution=solution, reason=reason, seconds=seconds))


def reason_of(error: Exception) -> str:
    """What a row says of a failure."""
    return str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"


def on_cpu(found: Reconstruction) -> Reconstruction:
    """The same reconstruction in CPU memory, images and features as float32."""
    return replace(
        found,
        images=None if found.images is None else found.images.detach().float().cpu(),
        labels=None if found.labels is None else found.labels.detach().cpu(),
        features=None if found.features is None else found.features.detach().float().cpu(),
        rows=None if found.rows is None else found.rows.detach().cpu(),
        membership=None if found.membership is None else found.membership.detach().cpu(),
    )


@cache
def _prepared() -> Surroundings:
    """In a worker, before its first question."""
    around: Surroundings = processes.shared()
    threads.fix(around.threads)
    return around


T = TypeVar("T", Observation, Knowledge)


def _moved(value: T, device: str, but: tuple[str, ...] = ()) -> T:
    """`value` with its tensors, and mappings of tensors, on `device`, `but` for some fields."""
    if device == "cpu":
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    found: dict[str, Any] = {}
    for name in own.keys() - set(but):
        if isinstance(own[name], Tensor):
            found[name] = own[name].to(device)
        elif isinstance(own[name], dict) and all(map(torch.is_tensor, own[name].values())):
            found[name] = {key: tensor.to(device) for key, tensor in own[name].items()}
    return replace(value, **found)
