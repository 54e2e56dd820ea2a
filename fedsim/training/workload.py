"""What one defense stack's federation computes, without a federation framework.

A `Workload` is built from (scenario, stack name) alone, so every process of a run (server, clients,
Ray actors) builds the same one. All batches are functions of (seed, round, client) and not of the
stack: every defense is attacked on the same victims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.data import DataSource
from fedsim.contracts.defense import NoisyAggregation, ServerRound
from fedsim.contracts.learner import Batches, Evaluation, Problem, Request
from fedsim.data import batches
from fedsim.data.partition import partition
from fedsim.learners.sgd import as_pixels
from fedsim.models.base import Classifier
from fedsim.recording.files import observation_id
from fedsim.scenario import Scenario
from fedsim.scenario.build import (
    announced,
    build_learner,
    build_stack,
    declared_training,
    plugin_class,
)
from fedsim.system.device import resolve_device
from fedsim.training.schedule import Probe, Schedule
from fedsim.types import (
    Dataset,
    Effect,
    FedsimError,
    LocalTraining,
    ModelSpec,
    Observation,
    RowTruth,
    Table,
    Tensors,
    Truth,
    Unit,
    Update,
)


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """What a client computed in a round. Only `update` (and `loss`, if reported) leaves it."""

    update: Update
    truth: Truth | None
    """With features in a round that is observed; None where nothing is recorded."""
    state: Tensors
    """The client's defense state for its next round (unchanged by a probe)."""
    loss: float | None


class Workload:
    """The computations of one defense stack's federation."""

    def __init__(
        self, scenario: Scenario, stack_name: str, dataset: Dataset | Table | None = None
    ) -> None:
        """`dataset` spares loading the source again.

        Raises:
            FedsimError: the data is missing or not what the learner takes, the partition is
                impossible, or the model does not fit the images.
        """
        self.scenario = scenario
        self.stack_name = stack_name
        self.device = torch.device(resolve_device(scenario.device))
        self.stack = build_stack(scenario.defenses[stack_name])
        declared = declared_training(scenario)
        self.declared = declared
        """Before the stack's training defenses."""
        self.training = self.stack.training(declared)
        self.dataset = load_dataset(scenario) if dataset is None else dataset
        learner = build_learner(scenario.learner)
        if not isinstance(self.dataset, learner.data):
            raise FedsimError(
                f"data.source: {self.dataset.name} is {_KIND[type(self.dataset)]}, and learner "
                f"{scenario.learner.name} computes from {_KIND[learner.data]}; choose another "
                "source, or another learner (`fedsim list learners`)"
            )
        with blaming("data.partition"):
            self.parts = partition(
                self.dataset,
                scenario.data.partition,
                scenario.data.clients,
                rng.derive(scenario.seed, "partition"),
                least=declared.batch_size if learner.trains else 1,
            )
        with blaming("model" if learner.trains else "learner"):
            self.computation = learner.start(
                Problem(
                    scenario=scenario,
                    stack=self.stack,
                    dataset=self.dataset,
                    device=self.device,
                )
            )
        self.trains = learner.trains
        self.release = self.computation.release
        self._unique: dict[int, Tensor] = {}
        self.withheld: Tensor | None = None
        """(n,) booleans: training examples that are drawn as ever but are not there, as in a
        neighbouring database; None of the data as they are."""

    @cached_property
    def unprotected(self) -> tuple[str, ...]:
        """The names of what clients release that passes by all defenses: tensors of no floats."""
        parameters, _ = self.initial()
        return tuple(n for n, value in parameters.items() if not value.is_floating_point())

    @cached_property
    def claims(self) -> bool:
        """Whether anything is proven of what clients release, or of what is made of it."""
        return any(held.mechanism for held in self.stack.guarantees(self.declared, self.release))

    @property
    def schedule(self) -> Schedule:
        """Who takes part when, and what is recorded."""
        aggregated = self.stack.aggregation is not None
        return Schedule(scenario=self.scenario, aggregated=aggregated, trains=self.trains)

    @property
    def model(self) -> Classifier | None:
        """The network that is trained, if the learner trains one."""
        return self.computation.model

    @property
    def spec(self) -> ModelSpec | None:
        """Of the network, if the learner trains one."""
        return self.computation.spec

    def initial(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, buffers) before the first round; the same for every stack.

        Raises:
            FedsimError: `training.weights` cannot be read, or are of another model.
        """
        if self.scenario.training.weights is None:
            return self.computation.initial()
        with blaming("training.weights"):
            return self.computation.initial()

    def shortened(self, steps: int) -> Workload:
        """The same with at most so many local steps declared."""
        short = copy(self)
        short.declared = replace(self.declared, steps=min(steps, self.declared.steps))
        short.training = self.stack.training(short.declared)
        return short

    @property
    def releases_statistics(self) -> bool:
        """Whether clients also release batch-norm statistics of their data."""
        return self.training.mode == "train" and self.computation.releases_statistics

    @property
    def private_statistics(self) -> Mapping[Unit, tuple[str, ...]]:
        """What clients compute with that one unit's data had a say in, without noise."""
        return private_statistics(self.scenario, self.dataset)

    def of_neighbours(self, dataset: Dataset | Table) -> Workload:
        """The same federation on other training data, of which all is computed anew.

        The source prepares the data again, and the partition is drawn again.
        """
        prepared = data_source(self.scenario).prepared(dataset)
        return Workload(self.scenario, self.stack_name, prepared)

    @property
    def remembers(self) -> bool:
        """Whether a client has to keep a state between its rounds."""
        return self.stack.remembers or self.training.sampling == "balls_in_bins"

    @property
    def reports_loss(self) -> bool:
        """Whether clients report their loss: not if the stack hides or privatizes their update."""
        return self.trains and self.stack.shows_losses(self.declared)

    def probed(self, parameters: Tensors, round: int) -> Tensors:
        """The weights at which the probes of `round` are computed, for the global `parameters`."""
        if not self.scenario.observe.plant:
            return parameters
        seed = rng.derive(self.scenario.seed, "plant", round)
        return self.computation.probed(parameters, seed)

    def recordings(self) -> Iterator[Observation]:
        """What a run without failures records, without tensors, in canonical order."""
        for round in range(1, self.scenario.training.rounds + 1):
            clients = self.schedule.observed(round)
            if not clients:
                continue
            seen = [-1] if self.stack.aggregation else clients
            asked: list[Probe | None] = list(self.schedule.probes(round)) or [None]
            for probe in asked:
                for client in seen:
                    yield self.observation(
                        round,
                        client,
                        Update(tensors={}, num_examples=0),
                        {},
                        {},
                        probe=probe,
                        num_clients=len(clients) if client < 0 else 1,
                        releases=self.scenario.observe.releases,
                    )

    def client_update(
        self,
        client: int,
        round: int,
        parameters: Tensors,
        buffers: Tensors,
        state: Tensors,
        *,
        probe: Probe | None = None,
    ) -> ClientResult:
        """Train `client` in `round` on the global model and apply the stack. Pure.

        `state` is the client's defense state after its previous round (empty before the first).

        Raises:
            FedsimError: the batch is larger than the client's data.
        """
        training = self._training(probe)
        taken = int(state.get(_STEPS, 0))
        path = _path(round, client, probe)
        truth: Truth | None = None
        if isinstance(self.dataset, Dataset) and self.trains:
            drawn = self._batches(self.dataset, client, training, round, probe, taken)
        else:
            rows, truth = self._rows(client, round, probe)
            drawn = [rows]
        request = Request(
            batches=drawn,
            parameters=parameters,
            buffers=buffers,
            training=training,
            stream=rng.generator(self.scenario.seed, "learner", *path),
            recorded=self.schedule.is_observed(round),
        )
        again = (probe.release,) if probe and probe.release else ()
        stream = rng.generator(self.scenario.seed, "defense", *path, *again)
        with self.stack.recalling(state) as remembered:
            computed = self.computation.compute(request, stream)
        update = {name: value.cpu() for name, value in computed.update.items()}
        before = state or self.stack.init(update, self._declared(probe), self.release)
        defended, after = self.stack.apply(update, before, stream)
        steps: Tensors = {}
        if training.sampling == "balls_in_bins":
            steps = {_STEPS: torch.tensor(taken + training.steps)}
        return ClientResult(
            update=Update(
                tensors=defended,
                num_examples=computed.num_examples,
                buffers={name: value.cpu() for name, value in computed.buffers.items()},
            ),
            truth=truth or computed.truth,
            state={**after, **remembered, **steps} if probe is None else state,
            loss=computed.loss,
        )

    def check_assumptions(self) -> None:
        """Refuse data that contradict what the stack's claim assumes of them.

        Those of every release of a closed-form learner are looked at; training assumes nothing.

        Raises:
            FedsimError: they do (`Computation.check`).
        """
        if self.trains:
            return
        for round in range(1, self.scenario.training.rounds + 1):
            participants = self.schedule.participants(round)
            self.computation.check({client: self._held(client) for client in participants})
            for probe in self.schedule.probes(round):
                asked = self.schedule.observed(round)
                self.computation.check(
                    {client: self._rows(client, round, probe)[0] for client in asked}
                )

    def combined(self, updates: Iterable[Update], round: int, probe: Probe | None = None) -> Update:
        """What the server gets to see of all `updates` of `round`, if the stack combines them."""
        aggregation = self.stack.aggregation
        assert aggregation is not None
        combined = aggregation.combine(updates)
        if not isinstance(aggregation, NoisyAggregation):
            return combined
        seed, path = self.scenario.seed, ("defense", "server")
        asked = (probe.batch_size, probe.trial, probe.release) if probe else ()
        *_, before, _ = self.stack.guarantees(self._declared(probe), self.release)
        return aggregation.noised(
            combined,
            ServerRound(
                clients=len(self.schedule.participants(round)),
                sensitivity=before.sensitivity,
                stream=rng.generator(seed, *path, round, *asked),
                before=rng.generator(seed, *path, round - 1) if round > 1 else None,
            ),
        )

    def moved(self, before: Tensor, update: Tensor) -> Tensor:
        """One parameter of the global model `before` as a client's `update` would have it."""
        return self.computation.moved(before, update, self.training)

    def concluded(self, mean: Tensors, clients: int) -> Tensors:
        """The new global parameters, given the strategy's `mean` over so many clients."""
        return self.computation.concluded(mean, clients)

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
    ) -> Observation:
        """What the attacker saw of `update`, decoded from the wire; client -1: the aggregate.

        Of several `releases` it is their mean.
        """
        spec = self.computation.describe()
        assert spec is not None
        refs = self.scenario.defenses[self.stack_name]
        return Observation(
            id=self.observation_id(round, client, probe),
            update=update.tensors,
            buffers_update=update.buffers,
            parameters=parameters,
            buffers=buffers,
            spec=spec,
            training=self._training(probe),
            defense=announced(self.stack, refs, self._declared(probe), self.release),
            effect=self.effect(probe),
            vantage=self.stack.vantage,
            round=round,
            client=client,
            num_clients=num_clients,
            trial=probe.trial if probe else 0,
            seed=self.scenario.attack_seed,
            releases=releases,
        )

    def effect(self, probe: Probe | None = None) -> Effect:
        """What the stack does to an update."""
        return self.stack.effect(self._declared(probe), self.release)

    def observation_id(self, round: int, client: int, probe: Probe | None) -> str:
        """The id under which an update is recorded; client -1 is the aggregate."""
        suffix = f"b{probe.batch_size}-t{probe.trial}" if probe else "training"
        return observation_id(self.stack_name, round, client, suffix)

    def test_set(self) -> tuple[int, float | None]:
        """(number of test examples, share of the most frequent class; None of no classes)."""
        data = self.dataset
        if isinstance(data, Dataset):
            labels = data.test_labels
        elif data.classes:
            labels = (data.test_rows[:, -1] > 0).long()
        else:
            return len(data.test_rows), None
        return len(labels), float(labels.bincount().max()) / len(labels)

    def evaluate(self, parameters: Tensors, buffers: Tensors) -> Evaluation:
        """Mean loss and accuracy of the global model on the test split."""
        return self.computation.evaluate(parameters, buffers)

    def _training(self, probe: Probe | None) -> LocalTraining:
        return self.stack.training(self._declared(probe))

    def _declared(self, probe: Probe | None) -> LocalTraining:
        return self.declared if probe is None else self.declared_of(probe.batch_size)

    def declared_of(self, batch_size: int) -> LocalTraining:
        """The local training of a probe of so many images, before the stack's training defenses.

        An attacker knows of how many it is: so they are drawn without replacement.
        """
        return replace(self.declared, batch_size=batch_size, sampling="without_replacement")

    def _held(self, client: int) -> tuple[Tensor, Tensor]:
        """All that the client holds, rows or pixels, and the labels."""
        own, data = self.parts[client], self.dataset
        if isinstance(data, Table):
            return data.train_rows[own], data.train_labels[own]
        return as_pixels(data.train_images[own]), data.train_labels[own]

    def _rows(
        self, client: int, round: int, probe: Probe | None
    ) -> tuple[tuple[Tensor, Tensor], RowTruth | None]:
        """(inputs, labels) of a closed-form release, and which of the client's rows they are.

        Of a training release, all that the client holds and None.
        """
        held = self._held(client)
        if probe is None:
            return held, None
        truth = self.computation.candidates(*held)
        assert truth is not None
        stream = rng.generator(self.scenario.seed, "batch", *_path(round, client, probe))
        chances = torch.rand(len(truth.rows), generator=stream, dtype=torch.float64)
        members = chances < probe.batch_size / len(truth.rows)
        return (held[0][members], held[1][members]), replace(truth, members=members)

    def _batches(
        self,
        dataset: Dataset,
        client: int,
        training: LocalTraining,
        round: int,
        probe: Probe | None,
        taken: int,
    ) -> Batches:
        """Pixels and labels of every local step.

        `taken` is how many steps the client has taken in earlier rounds.
        """
        found = []
        distinct = _distinct(training)
        for step in range(distinct):
            if probe and (own := self._victims(client, round, probe, step)) is not None:
                chosen = own
            else:
                path = (*_path(round, client, probe), step)
                chosen = self._chosen(client, training, path, taken + step)
            pixels = as_pixels(dataset.train_images[chosen])
            found.append((pixels, dataset.train_labels[chosen]))
        return found * (training.steps // distinct)

    def check_victims(self, client: int, batch_size: int) -> None:
        """Refuse more trials of probes of `batch_size` images than `client` has images for.

        Raises:
            FedsimError: there are too few, with how many trials there can be.
        """
        trials = self.scenario.observe.trials
        if trials == 1 or not isinstance(self.dataset, Dataset):
            return
        training = self.stack.training(self.declared_of(batch_size))
        needed, held = batch_size * _distinct(training), len(self._different(client))
        if trials * needed > held:
            raise FedsimError(
                f"{trials} trials of {needed} images each take {trials * needed} different ones, "
                f"and client {client} holds {held}: lower it to {max(1, held // needed)}, or use "
                "smaller batches, fewer clients or a more even partition"
            )

    def _victims(self, client: int, round: int, probe: Probe, step: int) -> Tensor | None:
        """Indices of the images of one step of a probe; no two trials share one.

        None where a single trial takes more than the client holds: it draws each step anew.

        Raises:
            FedsimError: several trials do.
        """
        own, size = self._different(client), probe.batch_size
        stream = rng.generator(self.scenario.seed, "victims", round, client, size)
        drawn = batches.of_trial(own, size, probe.trial, self.scenario.observe.trials, step, stream)
        if drawn is None:
            self.check_victims(client, size)
            return None
        return drawn if self.withheld is None else drawn[~self.withheld[drawn]]

    def _different(self, client: int) -> Tensor:
        """Indices of the client's images, one of each content."""
        if client not in self._unique:
            assert isinstance(self.dataset, Dataset)
            own = self.parts[client]
            self._unique[client] = batches.distinct(own, self.dataset.train_images)
        return self._unique[client]

    def _chosen(
        self, client: int, training: LocalTraining, path: tuple[int, ...], step: int
    ) -> Tensor:
        """Indices of the examples of one batch."""
        own, seed = self.parts[client], self.scenario.seed
        if training.sampling == "balls_in_bins":
            stream = rng.generator(seed, "bins", client)
            drawn = batches.balls_in_bins(own, training.bins(len(own)), step, stream)
        else:
            poisson = training.sampling == "poisson"
            draw = batches.poisson if poisson else batches.without_replacement
            drawn = draw(own, training.batch_size, rng.generator(seed, "batch", *path))
        return drawn if self.withheld is None else drawn[~self.withheld[drawn]]


def _distinct(training: LocalTraining) -> int:
    """How many batches of its own a local training draws."""
    return training.steps if training.batches == "different" else 1


def _path(round: int, client: int, probe: Probe | None) -> tuple[int, ...]:
    """Of the streams of one client's release."""
    asked = () if probe is None else (probe.batch_size, probe.trial)
    return (round, client, *asked)


_STEPS = "sampling.steps"
"""Name, in a client's state, of how many local steps it has taken over all its rounds."""

_BY_LABEL = ("dirichlet", "shards")
_BY_PLACE = ("iid", "file")

_WEIGHTS = (
    "training.weights, which may be of a model of the same clients (if none of their data had a "
    "part in them, declare it: `privacy: {weights: public}`)"
)
"""Partitions in which an example's label decides on where others go."""

_KIND = {Dataset: "images", Table: "a table"}


def load_dataset(scenario: Scenario) -> Dataset | Table:
    """Load the scenario's data source.

    Raises:
        FedsimError: the source is not installed, or its data is missing or unreadable.
    """
    with blaming("data.source"):
        return data_source(scenario).load()


def data_source(scenario: Scenario) -> DataSource:
    """The scenario's data source.

    Raises:
        FedsimError: it is not installed, or its parameters do not fit.
    """
    chosen = scenario.data.source
    source = plugin_class("fedsim.data", chosen.name).model_validate(chosen.parameters)
    assert isinstance(source, DataSource)
    return source


def private_statistics(
    scenario: Scenario, dataset: Dataset | Table
) -> Mapping[Unit, tuple[str, ...]]:
    """What of a federation's set-up was computed from training data without noise, by whose.

    Weights to start from may be a model of the same clients, trained without noise: they count as
    that unless the scenario declares them public.

    Where a partition deals by labels, one example also has a say in who holds the others.
    """
    found = dataset.private_statistics
    if found is None:
        kind = type(dataset).__name__
        found = (f"data source {dataset.name} does not declare {kind}.private_statistics",)
    if scenario.training.weights is not None and scenario.privacy.weights != "public":
        found += (_WEIGHTS,)
    dealt = scenario.data.partition.name
    of_examples = found
    if dealt in _BY_LABEL:
        of_examples += (f"partition {dealt}, which deals examples by their labels",)
    placed = isinstance(dataset, Dataset) and dataset.placed_by_label
    if placed and dealt in _BY_PLACE and scenario.data.clients > 1:
        of_examples += (
            f"partition {dealt}, which deals examples by their places, in which labels have a say "
            "where files of two classes share a name (give each file a name of its own)",
        )
    return {"client": found, "example": of_examples}


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Let a FedsimError from inside start with the scenario's key that is to blame."""
    try:
        yield
    except FedsimError as error:
        raise FedsimError(f"{key}: {error}") from error
