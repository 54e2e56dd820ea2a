"""Defines questions and answers of processes that attack: no truth, and no run's folder."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, AttackState, Progress, Solution, solve
from fedsim.contracts.grant import Knowledge
from fedsim.models import live
from fedsim.models.base import Classifier
from fedsim.system import processes, threads
from fedsim.system.device import move_tensors
from fedsim.types import FedsimError, Observation, Reconstruction


@dataclass(frozen=True, kw_only=True)
class Question:
    """Asks an attack about an observation, or a row of it, from `restarts` >= 1 starting points."""

    attack: Attack[AttackState]
    observation: Observation
    """The recording as the threat model shows it."""
    knowledge: Knowledge
    seed: int
    restarts: int

    def answer(self, progress: Callable[[Progress], None] | None = None) -> Solution:
        """Runs the attack by `solve`, and raises as it does, with torch's global stream seeded."""
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
class AttackAnswer:
    """Holds what became of a question: a solution, or the `reason` of its failure (else None)."""

    solution: Solution | None
    """Solution, with tensors in CPU memory; None if the attack failed."""
    reason: str | None
    seconds: float
    """Wall-clock time that the attack took, if it failed, too."""


@dataclass(frozen=True, kw_only=True)
class Public:
    """Holds public data that a threat model can grant, as a run's folder has them for attacks."""

    images: Tensor | None = None
    """(P, C, H, W) uint8, or rows (P, D) float32, of the test split; None if not granted."""
    labels: Tensor | None = None
    """(P,) int64: their classes; None if not recorded."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Holds what all questions to a process share: `device`, number of `threads`, public data."""

    device: str
    threads: int
    public: Public
    models: Mapping[str, Classifier] = field(default_factory=dict)
    """Models that no plugin builds, by the names that observations have for them."""


def pack_questions(questions: Sequence[Question]) -> bytes:
    """Pickles questions for `answer_packed`, without public data, which a worker has.

    A ValueError says that they do not all have one and the same observation object.
    """
    (observation,) = {id(each.observation): each.observation for each in questions}.values()
    rest = []
    for each in questions:
        known = replace(each.knowledge, public_images=None, public_labels=None)
        rest.append(pickle.dumps((each.attack, known, each.seed, each.restarts)))
    return pickle.dumps((observation, rest))


def unpack_answers(answers: bytes) -> list[AttackAnswer]:
    """Returns the answers that `answer_packed` gave, in order; only the last may be a failure."""
    found: list[AttackAnswer] = pickle.loads(answers)  # noqa: S301 - a process that this one started
    return found


def answer_packed(index: int, questions: bytes) -> bytes:
    """Answers what `pack_questions` packed, up to the first failure, for `unpack_answers`.

    It runs in a worker that `processes.pool` started with `Surroundings`, and puts (`index`,
    progress) into the pool's queue. `index` is the caller's name for the job.
    """
    around = _surroundings()
    observation, rest = pickle.loads(questions)  # noqa: S301 - this process's parent wrote it
    observation = move_tensors(observation, around.device)
    answers: list[AttackAnswer] = []
    for written in rest:
        # Unpickled only now: the rows of a later question would give away the answer to this one.
        attack, known, seed, restarts = pickle.loads(written)  # noqa: S301 - as above
        known = replace(
            known, public_images=around.public.images, public_labels=around.public.labels
        )
        asked = Question(
            attack=attack,
            observation=observation,
            knowledge=move_tensors(known, around.device, but=("other_rows", "candidate")),
            seed=seed,
            restarts=restarts,
        )
        started = time.perf_counter()
        solution, reason = None, None
        try:
            found = asked.answer(lambda at: processes.tell((index, at)))
            solution = replace(found, reconstruction=on_cpu(found.reconstruction))
        except Exception as error:  # a third party's attack may raise anything: the row says what
            reason = reason_of(error)
        seconds = time.perf_counter() - started
        answers.append(AttackAnswer(solution=solution, reason=reason, seconds=seconds))
        if solution is None:
            break
    return pickle.dumps(answers)


def reason_of(error: Exception) -> str:
    """Returns a FedsimError's text, or another error's type and text, to be the reason in a row."""
    return str(error) if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}"


def on_cpu(found: Reconstruction) -> Reconstruction:
    """Returns the reconstruction with its tensors in CPU memory, images and features as float32."""
    masks: dict[str, Any] = {
        name: None if mask is None else mask.detach().cpu()
        for name, mask in (("determined", found.determined), ("certified", found.certified))
    }
    parts = {
        # Attacks may compute in another precision; scores and files have float32.
        name: (part.float() if name in ("images", "features") else part).detach().cpu()
        for name, part in found.parts().items()
    }
    return replace(found.with_parts(parts), **masks)


@cache
def _surroundings() -> Surroundings:
    around: Surroundings = processes.get_shared()
    threads.fix(around.threads)
    live.adopt(around.models)
    return around
