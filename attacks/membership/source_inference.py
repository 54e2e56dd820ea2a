"""Source: which client holds a record that one of them is known to hold.

Each update, or sum of updates, is evidence on whether the record is part of it (`fit_presence`).
Before it was seen, each of K clients is as likely the source, so that a sum of n of them has the
record with chance n / K. A client's log-likelihood is the evidence of all that it took part in, up
to a constant. So sums tell sources if not always the same clients take part.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge, SourceRecords
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import losses, weights_after
from fedsim_attacks.membership._presence_fit import append_public, fit_presence


@final
class SourceInference(DirectAttack):
    """Scores how likely each client holds each record, for records that one of them holds."""

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    asked_of_sources: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "fedsim: likelihood of each client in a Gaussian model of updates and sums; by losses: Hu, "
        "Salcic, Sun, Dobbie and Zhang, Source Inference Attacks in Federated Learning, ICDM 2021"
    )

    evidence: Literal["gradients", "losses"] = "gradients"
    """`gradients`: whether the record's gradient is part of each update. `losses`: the client whose
    model has the smallest loss, as published; over rounds, the loss less its mean over clients."""
    public: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """Number of public examples that stand for unknown members, if any are granted."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns scores (N, K) as `source` of `more`: N records, and K clients, ascending.

        An AttackFailed says that there are no records, that nothing tells clients apart, that all
        gradients are 0, or that sums show no client's losses.
        """
        records = knowledge.records
        if records is None or not len(records.labels):
            raise AttackFailed(
                "there are no records to ask about: set candidates aside (observe.candidates), and "
                "attack a recording in its run's folder"
            )
        if len(set(records.participants)) < 2:
            raise AttackFailed(
                "the same clients took part in all that was seen, so that none of them can be told "
                "from the others; observe all clients (observe.clients: all) or, behind a sum, "
                "rounds of different ones (federation.participation)"
            )
        if self.evidence == "losses":
            scores = _score_by_losses(records)
        else:
            scores = self._score_by_gradients(records, knowledge)
        return Reconstruction(more={"source": scores}, loss=0.0, iterations=0)

    def _score_by_gradients(self, records: SourceRecords, knowledge: Knowledge) -> Tensor:
        """Returns the clients' log-likelihoods (N, K), up to a constant of each record."""
        asked, clients = len(records.labels), records.clients
        examples = append_public((records.inputs, records.labels), knowledge, self.public)
        scores = torch.zeros(asked, len(clients), dtype=torch.float64)
        for seen, own in zip(records.seen, records.participants, strict=True):
            # A sum of all clients has every record, whoever holds it.
            if 0 < len(own) < len(clients):
                fit = fit_presence(seen, examples, asked, len(own) / len(clients))
                scores[:, [client in own for client in clients]] += fit.evidence[:, None]
        return scores


def _score_by_losses(records: SourceRecords) -> Tensor:
    """Returns the negative mean losses (N, K) of the records under each client's models."""
    if any(len(own) > 1 for own in records.participants):
        raise AttackFailed(
            "a sum has no model of a single client whose loss could be taken; use `evidence: "
            "gradients`"
        )
    clients, asked = records.clients, (records.inputs, records.labels)
    total = torch.zeros(len(records.labels), len(clients), dtype=torch.float64)
    times = torch.zeros(len(clients), dtype=torch.float64)
    together = zip(records.seen, records.participants, strict=True)
    # Recordings are ordered by round, which `groupby` relies on.
    for _, group in groupby(together, key=lambda pair: pair[0].round):
        pairs = list(group)
        places = [clients.index(own[0]) for _, own in pairs]
        found = torch.stack(
            [losses(seen, weights_after(seen, seen.update), asked) for seen, _ in pairs], dim=1
        )
        # Later rounds have smaller losses, also of clients that took no part in earlier ones.
        total[:, places] += found - found.mean(1, keepdim=True)
        times[places] += 1
    # Means, so that a client is no likelier for having taken part more often.
    return -total / times
