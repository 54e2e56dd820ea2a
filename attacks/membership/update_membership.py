"""Membership from updates, by asking whether an example's gradient is part of the sum."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import require_candidates
from fedsim_attacks.membership._presence_fit import append_public, fit_presence


@final
class UpdateMembership(DirectAttack):
    """Says of candidates whether they are part of a client's updates, or of a sum of clients.

    Updates of more than 262,144 entries are compared with gradients by a random sketch.
    """

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "fedsim: score test of each gradient in a Gaussian model of the update"

    public: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """Number of public examples that stand for unknown members, if any are granted."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns scores over all rounds as `membership` (N,), of spread 1 or less without a part.

        An AttackFailed says that there are no candidates, or that all gradients are 0.
        """
        candidates = require_candidates(knowledge)
        examples = append_public((candidates.inputs, candidates.labels), knowledge, self.public)
        total = torch.zeros(len(candidates.labels), dtype=torch.float64)
        losses, square = [], 0.0
        for seen in candidates.of_victim(observation):
            if not (weight := _find_shared_part(seen, observation)):
                continue
            fit = fit_presence(seen, examples, len(total))
            total += weight * fit.scores
            square += weight**2
            losses.append(fit.loss)
        # Scores of those that took no part have about unit spread, and the root keeps it so.
        return Reconstruction(
            membership=total / math.sqrt(square), loss=sum(losses) / len(losses), iterations=0
        )


def _find_shared_part(seen: Observation, asked: Observation) -> float:
    """Returns the share of the clients asked about, those of `asked`, that are part of `seen`."""
    # A candidate's score rises by that share on average, and its spread does not.
    if not (seen.participants and asked.participants):
        return 1.0
    return len({*seen.participants} & {*asked.participants}) / len(asked.participants)
