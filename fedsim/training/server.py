"""Computes what the server of one defense stack's federation does, without any client's data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import MaskedAggregation, NoisyAggregation, ServerRound, SumTerms
from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import Computation, Learner
from fedsim.contracts.stack import Stack
from fedsim.models.base import Classifier
from fedsim.recording.files import observation_id
from fedsim.scenario import Scenario
from fedsim.scenario.build import (
    announce_defenses,
    build_learner,
    build_stack,
    declared_training,
    problem_of,
    rate_factor,
)
from fedsim.scenario.document import blaming
from fedsim.system.device import resolve_device
from fedsim.training import spending
from fedsim.training.schedule import Probe, RoundPlan, Schedule
from fedsim.types import (
    UNKNOWN,
    Dataset,
    Effect,
    FedsimError,
    LocalTraining,
    ModelSpec,
    Observation,
    Table,
    Tensors,
    Unit,
    Update,
    Vantage,
    Watcher,
)

Announcement = tuple[LocalTraining, tuple[Mapping[str, object], ...], Effect]
"""Public facts of an update: its local training, its defenses, and their effect."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """States what a server is told of its clients' data: how much each holds, and no example."""

    held: Sequence[int]
    """Number of training examples of each client, by its number from 0; 0 where not known."""
    private_statistics: Mapping[Unit, tuple[str, ...]]
    """Unit -> parts of the set-up, in words, that its data influenced without noise. Where there
    are any, no ε is claimed for the unit."""

    @property
    def examples(self) -> int:
        """Number of training examples of all clients together."""
        return sum(self.held)


@dataclass(frozen=True, eq=False)
class Server:
    """Computes one defense stack's federation as its server knows it, without training data.

    Building it raises a FedsimError if learner, stack and data do not fit together, and a KeyError
    if `stack_name` is none of the scenario's `defenses`.
    """

    scenario: Scenario
    stack_name: str
    described: Dataset | Table
    """The data's description and test split, as `Dataset.without_training` returns them."""
    census: Census
    noise_seed: int | None = None
    """Seed of the noise that the server adds; None: the scenario's, which everybody knows."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, but a learner may take the data in another form.
        object.__setattr__(self, "described", self._learner.view(self.described))
        if not isinstance(self.described, self._learner.data):
            raise FedsimError(
                f"data.source: {self.described.name} is {_KIND[type(self.described)]}, and learner "
                f"{self.scenario.learner.name} computes from {_KIND[self._learner.data]}; choose "
                "another source, or another learner (`fedsim list learners`)"
            )
        # Built now, since it may be refused.
        if self.computation.model is not None:
            self.stack.note_shapes(self.computation.model.parameters())

    @cached_property
    def device(self) -> torch.device:
        """Device that clients compute on; a FedsimError if the scenario's is not available here."""
        return torch.device(resolve_device(self.scenario.device))

    @cached_property
    def stack(self) -> Stack:
        """Defenses of the stack; one that asks for an ε has the least noise that keeps to it."""
        refs = self.scenario.defenses[self.stack_name]
        written = build_stack(refs)
        asking = [i for i, ref in enumerate(refs) if spending.asked_epsilons(build_stack([ref]))]
        place = f"defenses.{self.stack_name}[{asking[-1] if asking else 0}]"
        schedule = self._schedule(written)
        account = spending.Account(self.scenario, schedule, self.declared, self.census.held)
        return spending.calibrate_noise(written, account, place)

    @cached_property
    def declared(self) -> LocalTraining:
        """Local training as the scenario declares it, before the stack's training defenses."""
        return declared_training(self.scenario.training)

    @cached_property
    def training(self) -> LocalTraining:
        """Local training as clients do it, under the stack; `lr` is that of the first round."""
        return self.stack.training(self.declared)

    @cached_property
    def _learner(self) -> Learner:
        return build_learner(self.scenario.learner)

    @cached_property
    def computation(self) -> Computation:
        """The learner bound to this federation: computes updates, and the next global model."""
        problem = problem_of(
            self.scenario, self.stack, self.described, self.census.examples, self.device
        )
        with blaming(self._learner.section):
            return self._learner.start(problem)

    @property
    def release(self) -> Release | None:
        """Facts about a closed-form learner's release on which ε depends; None if it trains."""
        return self.computation.release

    @cached_property
    def unprotected(self) -> tuple[str, ...]:
        """Names of the parameters that no defense treats, since they are not floating-point."""
        parameters, _ = self.initial()
        return tuple(n for n, value in parameters.items() if not value.is_floating_point())

    @cached_property
    def claims(self) -> bool:
        """Whether the stack proves any guarantee of clients' updates, or of their combination."""
        return any(held.mechanism for held in self.stack.guarantees(self.declared, self.release))

    @cached_property
    def protocol(self) -> MaskedAggregation | None:
        """Secure aggregation of the stack, by which clients mask answers; None if it has none."""
        aggregation = self.stack.aggregation
        return aggregation if isinstance(aggregation, MaskedAggregation) else None

    def sum_terms(self, probe: Probe | None) -> SumTerms:
        """Returns the terms of a secure sum of answers to `probe`, or (None) of training updates.

        The stack must have a `protocol`. A FedsimError says that nothing bounds an answer.
        """
        assert self.protocol is not None
        declared = self.declared_for(probe)
        # The last guarantee is the aggregation's. The one before bounds what each client adds to
        # the sum.
        *_, before, _ = self.stack.guarantees(declared, self.release)
        most = self.computation.most_examples(self.stack.training(declared))
        return self.protocol.terms(before, most)

    @cached_property
    def schedule(self) -> Schedule:
        """Plans of all rounds: who takes part, and what is recorded."""
        return self._schedule(self.stack)

    def plan(self, round: int) -> RoundPlan:
        """Returns who takes part in `round`, counted from 1, and what is recorded of it."""
        return self.schedule.round(round)

    def _schedule(self, stack: Stack) -> Schedule:
        return Schedule(
            scenario=self.scenario,
            aggregated=stack.aggregation is not None,
            records_training=self._learner.trains,
        )

    @property
    def model(self) -> Classifier | None:
        """Network that is trained; None if the learner trains none."""
        model = self.computation.model
        assert model is None or isinstance(model, Classifier)
        return model

    @property
    def spec(self) -> ModelSpec | None:
        """Description of the network; None if the learner trains none."""
        return self.computation.spec

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns (parameters, buffers) before round 1, equal for stacks without a `ModelDefense`.

        A FedsimError says that the file `training.weights` is missing or of another model.
        """
        if self.scenario.training.weights is None:
            return self.computation.initial()
        with blaming("training.weights"):
            return self.computation.initial()

    @cached_property
    def releases_statistics(self) -> bool:
        """Whether clients also release batch-norm statistics of their data, as buffers."""
        return self.training.mode == "train" and self.computation.releases_statistics

    @property
    def remembers(self) -> bool:
        """Whether a client has to keep its `ClientResult.state` between its rounds."""
        return self.stack.remembers or self.training.sampling == "balls_in_bins"

    @cached_property
    def reports_loss(self) -> bool:
        """Whether clients report their loss: not if the stack hides or privatizes their update."""
        return self.release is None and self.stack.shows_losses(self.declared)

    def plant_probe(self, parameters: Tensors, round: int) -> Tensors:
        """Returns the global `parameters` as probes of `round` get them: planted if so declared.

        `observe.plant` declares it; without it they are returned as they are.
        """
        if not self.scenario.observe.plant:
            return parameters
        seed = rng.derive(self.scenario.seed, "plant", round)
        return self.computation.plant_probe(parameters, seed)

    def recordings(self) -> Iterator[Observation]:
        """Yields what a run without failures records, round by round, with empty tensor mappings.

        Recordings of a round are ordered by watcher (as in `observe.vantages`), probe and client.
        Those of an eavesdropper are among them even if TLS hides what they would hold.
        """
        for round in range(1, self.scenario.training.rounds + 1):
            plan = self.plan(round)
            # None stands for the training update.
            asked: list[Probe | None] = list(plan.probes) or [None]
            for watcher in self.scenario.observe.vantages:
                others = len(plan.participants) - 1
                for probe in asked if watcher != "client" else [None]:
                    for client in self._seen_of(watcher, plan):
                        single = others if watcher == "client" else 1
                        yield self.observation(
                            round,
                            client,
                            Update(tensors={}, num_examples=0),
                            {},
                            {},
                            probe=probe,
                            num_clients=len(plan.observed) if client < 0 else single,
                            releases=self.scenario.observe.releases,
                            watcher=watcher,
                        )

    def _seen_of(self, watcher: Watcher, plan: RoundPlan) -> list[int]:
        """Returns the clients whose answers `watcher` sees in a round; -1: their combination."""
        if watcher == "client":
            return list(plan.lookers)
        # Combining hides single answers from the server, not from whoever listens on the wire.
        combined = [-1] if watcher == "server" and plan.observed else []
        if self.protocol:
            return [*combined, *plan.singled]
        return combined if combined and self.stack.aggregation else list(plan.observed)

    def combine_updates(
        self,
        updates: Iterable[Update],
        round: int,
        probe: Probe | None = None,
        *,
        seed: int | None = None,
    ) -> Update:
        """Returns what the server sees of all updates of a round, by the stack's aggregation.

        The stack must have one. No updates are a FedsimError.

        Args:
            updates: The clients' updates, which are consumed one by one.
            round: Number of the round, from 1.
            probe: Probe that they answer; None in training.
            seed: Seed of the server's noise; None: `noise_seed`, or else the scenario's.
        """
        aggregation = self.stack.aggregation
        assert aggregation is not None
        types: dict[str, torch.dtype] = {}
        # Updates pass one by one and are not kept, so their types are noted on the way.
        combined = aggregation.combine(_noting_types(updates, types))
        if not isinstance(aggregation, NoisyAggregation):
            return combined
        if seed is None:
            seed = self.scenario.seed if self.noise_seed is None else self.noise_seed
        path = ("defense", "server")
        asked = (probe.batch_size, probe.trial, probe.release) if probe else ()
        *_, before, _ = self.stack.guarantees(self.declared_for(probe), self.release)
        shown = aggregation.add_noise(
            combined,
            ServerRound(
                clients=len(self.plan(round).participants),
                sensitivity=before.sensitivity,
                stream=rng.generator(seed, *path, round, *asked),
                # The last round's noise is drawn again from its stream, and need not be kept.
                before=rng.generator(seed, *path, round - 1) if round > 1 else None,
            ),
        )
        tensors = {
            # Sums are added up in float64; what is shown has the clients' own types.
            name: value.to(types.get(name, value.dtype))
            for name, value in shown.tensors.items()
        }
        return replace(shown, tensors=tensors)

    def scale_rate(self, training: LocalTraining, round: int) -> LocalTraining:
        """Returns `training` at the learning rate that the scenario has in `round`, from 1."""
        factor = rate_factor(self.scenario.training, round)
        return training if factor == 1 else replace(training, lr=factor * training.lr)

    def apply_update(self, before: Tensor, update: Tensor, round: int) -> Tensor:
        """Returns a global parameter of value `before` after a client's `update` of it in `round`.

        A gradient is subtracted times that round's learning rate; a change of weights is added.
        """
        return self.computation.apply_update(before, update, self.scale_rate(self.training, round))

    def observation(
        self,
        round: int,
        client: int,
        update: Update,
        parameters: Tensors,
        buffers: Tensors,
        *,
        probe: Probe | None = None,
        num_clients: int = 1,
        releases: int = 1,
        watcher: Watcher = "server",
    ) -> Observation:
        """Returns what a watcher saw of an update, for a learner that attacks can observe.

        Args:
            round: Number of the round, from 1.
            client: Number of the client, or of the watching one; -1 for the aggregate.
            update: The update as the watcher decodes it.
            parameters: Parameters that clients started from.
            buffers: Buffers that they started from.
            probe: Probe that was answered; None in training.
            num_clients: Number of clients whose updates `update` combines.
            releases: Number of releases of the same batch whose mean `update` is.
            watcher: Who saw it.
        """
        spec = self.computation.describe()
        assert spec is not None
        vantage: Vantage = watcher
        if watcher == "server" and client < 0:
            vantage = "aggregate"
        # One client's part of a sum is masked. A participant sees the others' mean, which is not.
        masked = self.protocol is not None and client >= 0 and watcher != "client"
        training, defense, effect = self._announced(probe.batch_size if probe else None)
        return Observation(
            id=self._observation_id(round, client, probe, watcher),
            update=update.tensors,
            buffers_update=update.buffers,
            parameters=parameters,
            buffers=buffers,
            spec=spec,
            training=self.scale_rate(training, round),
            defense=defense,
            effect=replace(UNKNOWN, model=effect.model) if masked else effect,
            vantage=vantage,
            round=round,
            client=client,
            num_clients=num_clients,
            trial=probe.trial if probe else 0,
            # Never the scenario's own seed, from which an attack could draw batches and noise
            # again.
            seed=self.scenario.attack_seed,
            releases=releases,
        )

    @cached_property
    def _announced(self) -> Callable[[int | None], Announcement]:
        """Maps the batch size of a probe, or None for training, to public facts of the answer."""
        clipped = Effect(scaled=self.scenario.federation.clips_at_clients)

        # Every recording asks, for one of a few batch sizes, and guarantees take time to work out.
        @cache
        def announce(batch_size: int | None) -> Announcement:
            declared = self.declared if batch_size is None else self.declared.as_probed(batch_size)
            refs = self.scenario.defenses[self.stack_name]
            return (
                self.stack.training(declared),
                announce_defenses(self.stack, refs, declared, self.release),
                self.stack.effect(declared, self.release).then(clipped),
            )

        return announce

    def effect(self) -> Effect:
        """Returns the public effect of stack and strategy on an update of training."""
        return self._announced(None)[2]

    def _observation_id(
        self, round: int, client: int, probe: Probe | None, watcher: Watcher = "server"
    ) -> str:
        """Returns the id of what a watcher sees of an answer; client -1 is the aggregate."""
        suffix = f"b{probe.batch_size}-t{probe.trial}" if probe else "training"
        return observation_id(self.stack_name, round, client, suffix, watcher)

    def recorded_as(self, round: int, client: int, probe: Probe | None) -> list[str]:
        """Returns the `Observation.id`s, if any, of `client`'s answer (`probe` None: training)."""
        ids, plan = [], self.plan(round)
        if client in plan.observed and (probe or not plan.probes):
            seen_as = [-1] if self.stack.aggregation else [client]
            if self.protocol and client in plan.singled:
                seen_as.append(client)
            ids += [
                self._observation_id(round, number, probe, watcher)
                for watcher in self.schedule.watchers
                for number in seen_as
            ]
        # An update of training is also part of the mean that each other participant learns.
        if probe is None and client in plan.participants:
            ids += [
                self._observation_id(round, looker, None, "client")
                for looker in plan.lookers
                if looker != client
            ]
        return ids

    def test_set(self) -> tuple[int, float | None]:
        """Returns (count of test examples, share of the commonest class; None without classes)."""
        count, labels = len(self.described.test_inputs), self.described.test_classes
        return count, None if labels is None else float(labels.bincount().max()) / count

    def declared_for(self, probe: Probe | None) -> LocalTraining:
        """Returns the local training that answers `probe` (None: `declared`), before defenses."""
        return self.declared if probe is None else self.declared.as_probed(probe.batch_size)


def _noting_types(updates: Iterable[Update], types: dict[str, torch.dtype]) -> Iterator[Update]:
    for update in updates:
        types.update({name: value.dtype for name, value in update.tensors.items()})
        yield update


_KIND = {Dataset: "images", Table: "a table"}
