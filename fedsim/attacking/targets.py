"""Attacks put to the question: of a batch of images at once, of rows one target at a time.

An attack on rows knows the others and answers for one row. Were it handed several questions at
once, one of them would give away the answer to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fedsim import rng
from fedsim.attacking.knowledge import Public, hand_over, hand_over_row
from fedsim.contracts.attack import (
    Attack,
    AttackFailed,
    AttackState,
    Progress,
    Solution,
    solve,
    unreadable,
)
from fedsim.contracts.grant import Grant
from fedsim.types import Observation, Reconstruction, RowTruth, Truth


def question(
    attack: Attack[AttackState],
    observation: Observation,
    truth: Truth | None,
    granted: Grant,
    seed: int,
    *,
    public: Public | None = None,
    restarts: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Run `attack` on `observation` with what is granted of `truth` and of what is `public`.

    Of rows the answers are put together: for every row that took part, in order, or, from an attack
    that is asked of candidates, for every row that could have. What an attack draws from
    torch's global stream follows from `seed`, whatever was computed before in this process.

    Raises:
        AttackFailed: it cannot read such an observation, or `solve` raises it; of rows also if
            there is no truth to ask about or nothing to ask.
    """
    if reason := unanswerable(attack, observation, truth):
        raise AttackFailed(reason)
    if isinstance(truth, RowTruth):
        return _of_rows(attack, observation, truth, granted, seed, restarts, progress)
    seen, known = hand_over(observation, truth, granted, public)
    with rng.global_stream(seed):
        return solve(attack, seen, known, seed, restarts=restarts, progress=progress)


def unanswerable(
    attack: Attack[AttackState], observation: Observation, truth: Truth | None
) -> str | None:
    """Why `attack` cannot be asked about `observation` at all; None if it can."""
    if reason := unreadable(type(attack).__name__, attack.reads, observation.payload):
        return reason
    if observation.payload != "update" and not isinstance(truth, RowTruth):
        return "rows are asked for one at a time, which takes the run's truth/ folder"
    return None


def targets(attack: Attack[AttackState], truth: RowTruth) -> list[int]:
    """The rows that `attack` is asked about: those that took part, or could have."""
    if attack.asked_of_candidates:
        return list(range(len(truth.rows)))
    return truth.members.nonzero().flatten().tolist()


def _of_rows(
    attack: Attack[AttackState],
    observation: Observation,
    truth: RowTruth,
    granted: Grant,
    seed: int,
    restarts: int,
    progress: Callable[[Progress], None] | None,
) -> Solution:
    asked = attack.asked_of_candidates
    # Of the truth, so that nothing that an attack is handed tells which row is withheld.
    secret = rng.of_bytes(truth.rows.numpy().tobytes() + truth.members.numpy().tobytes())
    found = []
    for target in targets(attack, truth):
        own = rng.derive(seed, "target", target)
        exchanged = (
            rng.generator(secret, "exchanged", target) if observation.release.counted else None
        )
        known = hand_over_row(truth, target, granted, asked, exchanged)
        with rng.global_stream(own):
            answer = solve(attack, observation, known, own, restarts=restarts, progress=progress)
        found.append(answer)
    if not found:
        raise AttackFailed("no row took part in this release, so that there is none to recover")
    answers = [solution.reconstruction for solution in found]
    return Solution(
        reconstruction=Reconstruction(
            rows=_joined([answer.rows for answer in answers]),
            membership=_joined([answer.membership for answer in answers]),
            loss=math.fsum(answer.loss for answer in answers) / len(answers),
            iterations=sum(answer.iterations for answer in answers),
        ),
        restart=found[0].restart,
        losses=found[0].losses,
        seconds=math.fsum(solution.seconds for solution in found),
        iterations=sum(solution.iterations for solution in found),
        peak_memory_bytes=max(solution.peak_memory_bytes for solution in found),
    )


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None
