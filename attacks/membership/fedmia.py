"""Membership by a one-sided test in which the other clients are the null (FedMIA).

No other client trained on a candidate of the attacked one. So in each round their measurements tell
how a non-member's are distributed, and the attacked client's is compared with that.
"""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import (
    UpdateSimilarity,
    losses,
    require_candidates,
    weights_after,
)

_FLOOR = 1e-8
"""Least variance of a null, as in the published code."""


@final
class FedMIA(DirectAttack):
    """Scores candidates by how far the attacked client stands out from all others."""

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Zhu, Li, Gu, Yao, Fan and Han, FedMIA, CVPR 2025, and their published code"
    )

    measure: Literal["loss", "cosine"] = "cosine"
    """`loss` (FedMIA-I): negative loss under each client's model. `cosine` (FedMIA-II): cosine of
    the candidate's gradient and each client's update, estimated by a random sketch for
    updates of more than 262,144 entries."""
    statistic: Literal["probability", "log_probability", "z"] = "probability"
    """Average over rounds: the normal probability of a lower measurement under the null, its
    logarithm, or the number of standard deviations. That one takes half of each candidate's
    variance from all candidates."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the mean statistic over rounds that show two others, as `membership` (N,)."""
        candidates = require_candidates(knowledge)
        if observation.vantage in ("aggregate", "client"):
            raise AttackFailed(
                "the null is other clients' own updates, and behind a sum none is seen; use "
                "update_membership, or observe where updates are seen one by one"
            )
        found = []
        # Recordings are ordered by round, which `groupby` relies on.
        for _, group in groupby(candidates.seen, key=lambda seen: seen.round):
            seen = list(group)
            own = [i for i, each in enumerate(seen) if each.client == observation.client]
            # A null of one other client has no variance.
            if own and len(seen) > 2:
                found.append(self._compare(self._measure(seen, candidates), own[0]))
        if not found:
            raise AttackFailed(
                "no round shows the attacked client beside two others; use `observe.clients: all`"
            )
        return Reconstruction(membership=torch.stack(found).mean(0), loss=0.0, iterations=0)

    def _measure(self, seen: list[Observation], candidates: MembershipCandidates) -> Tensor:
        """Returns measurements (clients, N) of one round."""
        asked = candidates.inputs, candidates.labels
        if self.measure == "loss":
            return torch.stack(
                [-losses(each, weights_after(each, each.update), *asked) for each in seen]
            )
        # All clients of a round start from the same weights.
        similarity = UpdateSimilarity(seen[0], *asked)
        return torch.stack([similarity.cosine(each.update) for each in seen])

    def _compare(self, measured: Tensor, own: int) -> Tensor:
        """Returns the statistic (N,) of row `own` of `measured` (clients, N) against the others."""
        others = torch.cat([measured[:own], measured[own + 1 :]])
        mean, variance = others.mean(0), others.var(0, correction=0) + _FLOOR
        if self.statistic == "z":
            # Few clients estimate a variance poorly, so that it is drawn to the mean of all.
            variance = (variance + variance.mean()) / 2
        z = (measured[own] - mean) / variance.sqrt()
        if self.statistic == "z":
            return z
        # Far below the null the probability underflows to 0. Its logarithm is computed as such.
        chance = torch.special.ndtr if self.statistic == "probability" else torch.special.log_ndtr
        levels: Tensor = chance(z)
        return levels
