"""Plans who takes part in which round, and what is recorded of it.

Plans follow from the scenario and its seed alone, so every process of a run computes the same ones,
and all defenses are attacked on the same victims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from fedsim import rng
from fedsim.scenario import Scenario
from fedsim.types import Watcher


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Asks a client for the update of another batch, to be recorded and never aggregated."""

    batch_size: int
    """Number of images in that batch; of a closed-form release, the mean number of rows."""
    trial: int
    """Number of the batch of that size, from 0. No two trials share an image; rows of a closed-form
    release may be in several."""
    release: int = 0
    """Number of the release of that batch, from 0; releases differ in a defense's randomness."""


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Says which clients, by ascending numbers from 0, take part in a round and are recorded."""

    number: int
    """Number of the round, from 1."""
    participants: tuple[int, ...]
    is_observed: bool
    """Whether anything is recorded in the round."""
    observed: tuple[int, ...]
    """Clients whose updates (of training or of probes) are recorded, alone or combined."""
    singled: tuple[int, ...]
    """Those of `observed` that `observe.clients` names. A secure sum's masked parts are recorded of
    these alone."""
    lookers: tuple[int, ...]
    """Participants who learn the others' mean update from the next global model: those that take
    part in the next round, too, and that `observe` has look as `client`."""
    probes: tuple[Probe, ...]
    """Probes that `observed` answer besides training, by batch size and trial, with `release` 0;
    empty if the training update itself is recorded, or nothing."""
    releases: int
    """Number of times that each of `probes` is asked for, `release` being 0 to `releases` - 1."""

    def asks(self, probe: Probe | None) -> bool:
        """Returns whether the scenario asks for `probe` in this round; False for None."""
        return (
            probe is not None
            and replace(probe, release=0) in self.probes
            and probe.release < self.releases
        )


_KEPT = 256
"""Number of rounds whose plans are kept; a run takes rounds in order, and asks for each often."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Plans the rounds of a scenario under one defense stack, by the scenario's seed."""

    scenario: Scenario
    aggregated: bool
    """Whether the stack combines the clients' updates before the server sees them."""
    records_training: bool
    """Whether updates of training can be recorded: the learner trains a model."""

    @property
    def records(self) -> bool:
        """Whether anything can be recorded: updates of training, or answers to probes."""
        return self.records_training or self.scenario.observe.batch_sizes is not None

    def round(self, number: int) -> RoundPlan:
        """Returns the plan of the round `number`, counted from 1."""
        return self._plans(number)

    @cached_property
    def _plans(self) -> Callable[[int], RoundPlan]:
        # A cache on the method itself would keep every schedule alive.
        return lru_cache(maxsize=_KEPT)(self._plan)

    @cached_property
    def _samples(self) -> Callable[[int], tuple[int, ...]]:
        return lru_cache(maxsize=_KEPT)(self._sample)

    def _plan(self, number: int) -> RoundPlan:
        wanted = self.scenario.observe
        observed = self._choose_observed(number)
        probes: list[Probe] = []
        if wanted.batch_sizes is not None and self.is_observed(number):
            trials = range(wanted.trials)
            probes = [
                Probe(batch_size=size, trial=t) for size in wanted.batch_sizes for t in trials
            ]
        return RoundPlan(
            number=number,
            participants=self._samples(number),
            is_observed=self.is_observed(number),
            observed=observed,
            singled=tuple(c for c in observed if wanted.clients == "all" or c in wanted.clients),
            lookers=self._lookers(number),
            probes=tuple(probes),
            releases=wanted.releases,
        )

    def _sample(self, number: int) -> tuple[int, ...]:
        clients = self.scenario.data.clients
        # Halves are rounded up; round() would take 2.5 to 2.
        count = max(1, math.floor(self.scenario.federation.participation * clients + 0.5))
        # Each round has its own stream, so that a plan needs none of the rounds before.
        stream = rng.generator(self.scenario.seed, "participants", number)
        return tuple(sorted(torch.randperm(clients, generator=stream)[:count].tolist()))

    def is_observed(self, number: int) -> bool:
        """Returns whether anything is recorded in the round `number`, counted from 1."""
        if not self.records:
            return False
        last = self.scenario.training.rounds
        return number in {last if r == "last" else r for r in self.scenario.observe.rounds}

    def _choose_observed(self, number: int) -> tuple[int, ...]:
        if not self.is_observed(number):
            return ()
        wanted = self.scenario.observe.clients
        probing = self.scenario.observe.batch_sizes is not None
        taking_part = self._samples(number)
        # A combination is made of all participants' updates, whoever is wanted.
        if self.aggregated or (wanted == "all" and not probing):
            return taking_part
        if wanted == "all":
            return tuple(range(self.scenario.data.clients))
        return tuple(sorted(wanted) if probing else (c for c in taking_part if c in wanted))

    def _lookers(self, number: int) -> tuple[int, ...]:
        asked = self.scenario.observe
        taking_part = self._samples(number)
        is_last = number == self.scenario.training.rounds
        if "client" not in asked.vantages or not self.is_observed(number):
            return ()
        # Nobody receives the model after the last round, and who trains alone learns of nobody.
        if is_last or len(taking_part) == 1:
            return ()
        after = self._samples(number + 1)
        return tuple(
            client
            for client in taking_part
            if client in after and (asked.clients == "all" or client in asked.clients)
        )

    @property
    def watchers(self) -> list[Watcher]:
        """Those of `observe.vantages` who see answers: server and, without TLS, eavesdropper."""
        wanted = self.scenario.observe.vantages
        encrypted = self.scenario.federation.tls
        return [
            watcher
            for watcher in wanted
            if watcher == "server" or (watcher == "eavesdropper" and not encrypted)
        ]
