"""Asks attacks: about a batch of images at once, about rows of a table one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedsim import rng
from fedsim.attacking.knowledge import (
    Public,
    hand_over,
    hand_over_candidates,
    hand_over_records,
    hand_over_rounds,
    hand_over_row,
    remove_truncated,
)
from fedsim.attacking.question import Question
from fedsim.contracts.attack import (
    Attack,
    AttackFailed,
    AttackState,
    Solution,
    images_alone,
    unreadable,
)
from fedsim.contracts.grant import Grant
from fedsim.types import CANDIDATE_MEMBERS, Observation, Reconstruction, RowTruth, Truth


def questions(
    attack: Attack[AttackState],
    observation: Observation,
    truth: Truth | None,
    granted: Grant,
    seed: int,
    *,
    public: Public | None = None,
    restarts: int = 1,
    seen: Sequence[Observation] = (),
) -> Iterator[Question]:
    """Yields the questions to `attack` about `observation`, with the knowledge that is granted.

    Images are one question. Rows are a question each: every row that took part or, for an attack
    that is asked of candidates, every row that could have.

    Args:
        attack: The attack.
        observation: The recording.
        truth: What clients really used; None if it is not known, which rows do not allow.
        granted: What the threat model grants.
        seed: Seed of the attack.
        public: Public data of the observation's run.
        restarts: Number of starting points of each question.
        seen: Recordings of the same watcher up to this round, for attacks that join rounds. Empty:
            it saw this one alone.

    Raises:
        AttackFailed: the attack cannot read such an observation, or rows come without a truth.
    """
    if reason := unanswerable(attack, observation, truth):
        raise AttackFailed(reason)
    if isinstance(truth, RowTruth):
        yield from _of_rows(attack, observation, truth, granted, seed, restarts)
        return
    shown, known = hand_over(observation, truth, granted, public)
    rounds = hand_over_rounds(observation, granted, seen)
    if not attack.reads_truncated:
        shown, rounds = remove_truncated(shown), tuple(map(remove_truncated, rounds))
    if attack.asked_of_sources:
        known = replace(known, records=hand_over_records(truth, rounds))
    elif attack.asked_of_candidates:
        known = replace(known, candidates=hand_over_candidates(truth, rounds))
    if attack.joins_rounds:
        known = replace(known, seen=rounds)
    yield Question(attack=attack, observation=shown, knowledge=known, seed=seed, restarts=restarts)


def join_solutions(found: Sequence[Solution]) -> Solution:
    """Joins the answers to all `questions`, in their order, into one.

    Parts that all answers have are concatenated. The loss is the mean of the answers'; iterations
    and seconds are sums, and memory is the largest. All else is that of the first answer.

    Raises:
        AttackFailed: there are no answers.
    """
    if not found:
        raise AttackFailed("no row took part in this release, so that there is none to recover")
    if len(found) == 1:
        return found[0]
    answers = [solution.reconstruction for solution in found]
    parts = [answer.parts() for answer in answers]
    # A part that one answer lacks cannot be lined up with the targets.
    common = [name for name in parts[0] if all(name in part for part in parts)]
    joined = Reconstruction(
        loss=math.fsum(answer.loss for answer in answers) / len(answers),
        iterations=sum(answer.iterations for answer in answers),
    )
    return Solution(
        reconstruction=joined.with_parts(
            {name: torch.cat([part[name] for part in parts]) for name in common}
        ),
        restart=found[0].restart,
        losses=found[0].losses,
        seconds=math.fsum(solution.seconds for solution in found),
        iterations=sum(solution.iterations for solution in found),
        peak_memory_bytes=max(solution.peak_memory_bytes for solution in found),
    )


def unanswerable(
    attack: Attack[AttackState], observation: Observation, truth: Truth | None
) -> str | None:
    """Returns why `attack` cannot be asked about `observation` at all; None if it can."""
    if reason := unreadable(type(attack).__name__, attack.reads, observation.payload):
        return reason
    if observation.payload == "update" and observation.model.columns and not attack.takes_rows:
        return images_alone(type(attack).__name__)
    if (
        observation.payload == "update"
        and attack.asked_of_candidates
        and (truth is None or CANDIDATE_MEMBERS not in truth.tensors())
    ):
        return "membership is asked of candidates, and none were set aside (observe.candidates)"
    if observation.payload != "update" and not (truth and truth.asked_singly):
        return "rows are asked for one at a time, which takes the run's truth/ folder"
    return None


def _of_rows(
    attack: Attack[AttackState],
    observation: Observation,
    truth: RowTruth,
    granted: Grant,
    seed: int,
    restarts: int,
) -> Iterator[Question]:
    asked = attack.asked_of_candidates
    taking_part: list[int] = truth.members.nonzero().flatten().tolist()
    # Of the truth, so that nothing that an attack is handed tells which row is withheld.
    secret = rng.of_bytes(truth.rows.numpy().tobytes() + truth.members.numpy().tobytes())
    # One by one: of several questions at once, one would give away the answer to the next.
    for target in range(len(truth.rows)) if asked else taking_part:
        exchanged = (
            rng.generator(secret, "exchanged", target) if observation.release.counted else None
        )
        yield Question(
            attack=attack,
            observation=observation,
            knowledge=hand_over_row(truth, target, granted, asked, exchanged),
            seed=rng.derive(seed, "target", target),
            restarts=restarts,
        )
