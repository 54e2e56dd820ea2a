"""Who takes part in which round, and what is recorded of it.

All of it follows from the scenario and its seed: so every process of a run knows it without being
told. Of the stack it depends only on whether updates are combined before the server sees them, so
that defenses are attacked on the same victims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedsim import rng
from fedsim.scenario import Scenario
from fedsim.types import Watcher


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An update that is asked for only to be recorded: it is never aggregated.

    It is what the same client would have released in this round, had its batch been another one of
    `batch_size` images; so leakage can be compared across batch sizes and over many trials. Of a
    table, each of the client's rows takes part with the same chance, so many on average.
    """

    batch_size: int
    trial: int
    release: int = 0
    """Which of several releases of the same batch; only a defense's randomness differs."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Of one stack's federation. Rounds are counted from 1."""

    scenario: Scenario
    aggregated: bool
    """Whether the server sees the clients' updates combined only."""
    trains: bool
    """Whether the learner trains a network, over the rounds."""

    def participants(self, round: int) -> list[int]:
        """Clients sampled in `round`, ascending."""
        clients = self.scenario.data.clients
        count = max(1, math.floor(self.scenario.federation.participation * clients + 0.5))
        stream = rng.generator(self.scenario.seed, "participants", round)
        return sorted(torch.randperm(clients, generator=stream)[:count].tolist())

    def is_observed(self, round: int) -> bool:
        """Whether anything is recorded in `round`."""
        if not self.trains and self.scenario.observe.batch_sizes is None:
            return False
        last = self.scenario.training.rounds
        return round in {last if r == "last" else r for r in self.scenario.observe.rounds}

    def observed(self, round: int) -> list[int]:
        """Clients whose update (of training or of a probe) is recorded in `round`."""
        if not self.is_observed(round):
            return []
        wanted = self.scenario.observe.clients
        probing = self.scenario.observe.batch_sizes is not None
        taking_part = self.participants(round)
        if self.aggregated:
            return taking_part
        if wanted == "all":
            return list(range(self.scenario.data.clients)) if probing else taking_part
        return sorted(wanted) if probing else [c for c in taking_part if c in wanted]

    def singled(self, round: int) -> list[int]:
        """Participants of `round` whose own answers are recorded, though the server combines them:
        their parts of a secure sum."""
        wanted = self.scenario.observe.clients
        return [c for c in self.observed(round) if wanted == "all" or c in wanted]

    def lookers(self, round: int) -> list[int]:
        """Participants of `round` who learn the others' mean update from the next global model.

        They are those that take part in the next round, too, and look (`observe.vantages`).
        """
        asked = self.scenario.observe
        if "client" not in asked.vantages or not self.is_observed(round):
            return []
        taking_part = self.participants(round)
        if round == self.scenario.training.rounds or len(taking_part) == 1:
            return []
        after = self.participants(round + 1)
        return [
            client
            for client in taking_part
            if client in after and (asked.clients == "all" or client in asked.clients)
        ]

    @property
    def watchers(self) -> list[Watcher]:
        """Who sees the clients' answers, or their combination: the server and, in plaintext, an
        eavesdropper."""
        wanted = self.scenario.observe.vantages
        encrypted = self.scenario.federation.tls
        return [
            watcher
            for watcher in wanted
            if watcher == "server" or (watcher == "eavesdropper" and not encrypted)
        ]

    def probes(self, round: int) -> list[Probe]:
        """What `observed(round)` is asked besides training, `observe.releases` times each.

        Empty if the training update itself is recorded.
        """
        sizes = self.scenario.observe.batch_sizes
        if sizes is None or not self.is_observed(round):
            return []
        trials = range(self.scenario.observe.trials)
        return [Probe(batch_size=size, trial=trial) for size in sizes for trial in trials]

    def plans(self, round: int, probe: Probe | None) -> bool:
        """Whether the scenario asks for `probe` in `round`."""
        return (
            probe is not None
            and replace(probe, release=0) in self.probes(round)
            and probe.release < self.scenario.observe.releases
        )
