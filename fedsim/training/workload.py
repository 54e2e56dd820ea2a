"""One defense stack's federation with its clients' data: whoever computes as a client holds it.

A `Workload` is built from (scenario, stack name) alone, so every process that runs clients builds
the same one. All batches are functions of (seed, round, client) and not of the stack: every defense
is attacked on the same victims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.learner import Batches, Request
from fedsim.data import batches
from fedsim.data.partition import partition
from fedsim.learners.sgd import as_pixels
from fedsim.scenario import Scenario
from fedsim.training.blame import blaming
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.training.source import data_source, load_dataset, private_statistics
from fedsim.types import (
    Dataset,
    FedsimError,
    LocalTraining,
    RowTruth,
    Table,
    Tensors,
    Truth,
    Unit,
    Update,
)
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """What a client computed in a round. Only `update` (and `loss`, if reported) leaves it."""

    update: Update
    truth: Truth | None
    """With features in a round that is observed; None where nothing is recorded."""
    state: Tensors
    """The client's defense state for its next round (unchanged by a probe)."""
    loss: float | None


class Workload(Server):
    """What the clients of one defense stack's federation compute from their data.

    It knows all that the server knows, and is never handed to it (`server`).
    """

    def __init__(
        self, scenario: Scenario, stack_name: str, dataset: Dataset | Table | None = None
    ) -> None:
        """`dataset` spares loading the source again.

        Raises:
            FedsimError: the data is missing or not what the learner takes, the partition is
                impossible, or the model does not fit the images.
        """
        self.dataset = load_dataset(scenario) if dataset is None else dataset
        examples = len(self.dataset.train_labels)
        super().__init__(scenario, stack_name, self.dataset.without_training(), examples)
        with blaming("data.partition"):
            self.parts = partition(
                self.dataset,
                scenario.data.partition,
                scenario.data.clients,
                rng.derive(scenario.seed, "partition"),
                least=self.declared.batch_size if self.trains else 1,
            )
        self._unique: dict[int, Tensor] = {}
        self.withheld: Tensor | None = None
        """(n,) booleans: training examples that are drawn as ever but are not there, as in a
        neighbouring database; None of the data as they are."""

    def server(self) -> Server:
        """The same federation as its server knows it."""
        return Server(
            self.scenario, self.stack_name, self.described, len(self.dataset.train_labels)
        )

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
        with self.stack.memory_of(state) as remembered:
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
                f"{number_of(trials, 'trial')} of {number_of(needed, 'image')} need "
                f"{trials * needed} different ones, and client {client} holds {held}: lower it to "
                f"{max(1, held // needed)}, or use smaller batches, "
                "fewer clients or a more even partition"
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
