"""Membership from the losses of candidates over the models of all observed rounds.

A model has less loss on what it was trained on (Yeom et al., 2018). Over rounds the losses of a
candidate are a series, and its mean tells more than the last one.
"""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import losses, require_candidates, weights_after


@final
class LossTrajectory(DirectAttack):
    """Scores candidates by their losses under a client's models, or those of a sum of clients."""

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Yeom, Giacomelli, Fredrikson and Jha, Privacy Risk in Machine Learning, CSF 2018; over "
        "rounds: Gu, Bai and Xu, CS-MIA, Journal of Information Security and Applications 2022"
    )

    summary: Literal["mean", "last", "fall"] = "mean"
    """Score of a series: `mean`, the negative mean loss over rounds; `last`, the negative loss in
    the last round; `fall`, by how much a client's training lowers the loss, on average."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the score of each candidate, as `membership` (N,)."""
        candidates = require_candidates(knowledge)
        asked = candidates.inputs, candidates.labels
        seen = candidates.of_victim(observation)
        if self.summary == "last":
            seen = seen[-1:]
        after = torch.stack(
            [losses(each, weights_after(each, each.update), *asked) for each in seen]
        )
        if self.summary == "fall":
            after = after - torch.stack([losses(each, each.parameters, *asked) for each in seen])
        # A member's loss is low, and its score has to be high.
        return Reconstruction(membership=-after.mean(0), loss=0.0, iterations=0)
