"""Membership from how well a client's model, or its update, goes with an example: published scores.

A model has less loss on what it was trained on (Yeom et al., 2018), and the mean over rounds tells
more than the last one. FedMIA compares the attacked client with all others, as no other client
trained on its candidates: their measurements tell how a non-member's are distributed.
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

_FLOOR = 1e-8  # least variance of a null, as in the published code of FedMIA


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
        """Returns scores, high for members, as `membership` (N,). See `DirectAttack.reconstruct`.

        An AttackFailed says that there are no candidates.
        """
        candidates = require_candidates(knowledge)
        asked = candidates.inputs, candidates.labels
        seen = candidates.of_victim(observation)
        if self.summary == "last":
            seen = seen[-1:]
        after = torch.stack(
            [losses(each, weights_after(each, each.update), asked) for each in seen]
        )
        if self.summary == "fall":
            after = after - torch.stack([losses(each, each.parameters, asked) for each in seen])
        # A member's loss is low, and its score has to be high.
        return Reconstruction(membership=-after.mean(0), loss=0.0, iterations=0)


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
        """Returns mean similarities as `membership` (N,); AttackFailed without candidates."""
        candidates = require_candidates(knowledge)
        asked, each = (candidates.inputs, candidates.labels), []
        for seen in candidates.of_victim(observation):
            similarity = UpdateSimilarity(seen, asked)
            # Values of the option are the names of the two methods.
            each.append(getattr(similarity, self.measure)(seen.update))
        return Reconstruction(membership=torch.stack(each).mean(0), loss=0.0, iterations=0)


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
    """Average over rounds, of a normal distribution of the other clients: `probability` of a lower
    measurement, its logarithm, or the number of standard deviations (`z`), with half of each
    candidate's variance taken from all candidates."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the mean statistic over rounds that show two others or more: `membership` (N,).

        An AttackFailed says that there is no such round or no candidate, or that sums were seen.
        """
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
        asked = candidates.inputs, candidates.labels
        if self.measure == "loss":
            return torch.stack(
                [-losses(each, weights_after(each, each.update), asked) for each in seen]
            )
        # All clients of a round start from the same weights.
        similarity = UpdateSimilarity(seen[0], asked)
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
