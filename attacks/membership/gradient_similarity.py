"""Membership from how much an update points where a candidate's gradient does."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import UpdateSimilarity, require_candidates


@final
class GradientSimilarity(DirectAttack):
    """Scores candidates by the similarity of their gradients and the update, over all rounds.

    For updates of more than 262,144 entries, a random sketch estimates similarities.
    """

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Li, Li and Ribeiro, Effective Passive Membership Inference Attacks in Federated Learning "
        "against Overparameterized Models, ICLR 2023"
    )

    measure: Literal["cosine", "inner"] = "cosine"
    """`cosine`: of the gradient and the update. `inner`: their inner product."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns each candidate's mean similarity over rounds, as `membership` (N,)."""
        candidates = require_candidates(knowledge)
        each = []
        for seen in candidates.of_victim(observation):
            similarity = UpdateSimilarity(seen, candidates.inputs, candidates.labels)
            # Values of the option are the names of the two methods.
            each.append(getattr(similarity, self.measure)(seen.update))
        return Reconstruction(membership=torch.stack(each).mean(0), loss=0.0, iterations=0)
