"""Holds one defense stack's federation with its clients' data, for processes that run clients.

All batches are functions of (seed, round, client) and not of the stack: every defense is attacked
on the same victims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedsim import rng
from fedsim.data.partition import partition
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_learner, declared_training
from fedsim.scenario.document import blaming
from fedsim.training.client import CandidateSplit, Client, ClientResult, split_candidates
from fedsim.training.schedule import Probe
from fedsim.training.server import Census, Server
from fedsim.training.source import build_source, load_dataset, private_statistics
from fedsim.types import Dataset, FedsimError, Table, Tensors
from fedsim.words import number_of

IN_LOG = "the node's own log says more"
"""Ending of an error message to the server whose details could reveal a client's data."""


@dataclass(frozen=True, eq=False, init=False)
class Workload(Server):
    """Computes a stack's federation with its clients' data; the server gets `server()` alone."""

    dataset: Dataset | Table = field(init=False)
    """Data of the clients that compute here, with the test split."""
    clients: Sequence[Client] = field(init=False)
    """All clients in the order of their numbers, or the one that computes here."""

    def __init__(
        self, scenario: Scenario, stack_name: str, dataset: Dataset | Table | None = None
    ) -> None:
        """Loads the data, unless `dataset` is what `load_dataset` returns, and deals them.

        It fails as `Server`, and by a FedsimError if the data cannot be loaded or dealt.
        """
        learner = build_learner(scenario.learner)
        least = learner.least_examples(declared_training(scenario.training))
        data = learner.view(load_dataset(scenario) if dataset is None else dataset)
        with blaming("data.partition"):
            parts = partition(
                data,
                scenario.data.partition,
                scenario.data.clients,
                rng.derive(scenario.seed, "partition"),
                min_images=least,
            )
        splits: Sequence[CandidateSplit | None] = [None] * len(parts)
        if (count := scenario.observe.candidates) is not None:
            secret = rng.derive(scenario.seed, "candidates")
            splits = drawn = split_candidates(parts, data.inputs, count, secret, least=least)
            parts = [
                own[~torch.isin(own, split.held_out)]
                for own, split in zip(parts, drawn, strict=True)
            ]
        census = Census(
            held=[len(own) for own in parts],
            private_statistics=private_statistics(scenario, data, parts),
        )
        # The server's part is given no training data, so that nothing in it can compute from them.
        super().__init__(scenario, stack_name, data.without_training(), census)
        clients = tuple(
            Client(number=number, dataset=data, own=own, seed=scenario.seed, candidates=split)
            for number, (own, split) in enumerate(zip(parts, splits, strict=True))
        )
        object.__setattr__(self, "dataset", data)
        object.__setattr__(self, "clients", clients)

    def server(self) -> Server:
        """Returns the same federation as its server knows it, without training data."""
        return Server(self.scenario, self.stack_name, self.described, self.census)

    @property
    def parts(self) -> list[Tensor]:
        """(n,) indices of the examples of each of `clients`, in the training split."""
        return [client.own for client in self.clients]

    def client(self, number: int) -> Client:
        """Returns the client of that `number`; a FedsimError if it does not compute here."""
        for one in self.clients:
            if one.number == number:
                return one
        raise FedsimError(f"client {number} does not compute here")

    def of_neighbours(self, dataset: Dataset | Table) -> Workload:
        """Returns the federation on other data, prepared and dealt anew; it fails as when built."""
        prepared = build_source(self.scenario.data.source).prepared(dataset)
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
        """Returns what `Client.update` does of client number `client`; fails as it, or `client`."""
        own = self.client(client)
        return own.update(self, round, parameters, buffers, state, probe=probe)

    def check_assumptions(self) -> None:
        """Refuses, by a FedsimError, data of `clients` that defy what the stack's claim assumes."""
        if self.release is None:
            return
        here = {one.number: one for one in self.clients}
        for round in range(1, self.scenario.training.rounds + 1):
            taking_part = here.keys() & set(self.plan(round).participants)
            self.computation.check({number: here[number].held() for number in sorted(taking_part)})
            for probe in self.plan(round).probes:
                asked = here.keys() & set(self.plan(round).observed)
                self.computation.check(
                    {
                        number: here[number].rows(self.computation, round, probe)[0]
                        for number in sorted(asked)
                    }
                )


@dataclass(frozen=True, eq=False, init=False)
class OneClient(Workload):
    """Computes as one client of a federation whose other clients compute elsewhere."""

    def __init__(
        self, scenario: Scenario, stack_name: str, client: Client, census: Census | None = None
    ) -> None:
        """Takes one `client`, and the `census` of all; without that, an ε of all clients is wrong.

        It fails as `Server`, and by a FedsimError if `census` has another number of its examples.
        """
        data = build_learner(scenario.learner).view(client.dataset)
        client = replace(client, dataset=data)
        held = len(client.own)
        if census is None:
            # A count of 0 stands for one that is not known.
            counts = [0] * scenario.data.clients
            counts[client.number] = held
            census = Census(held=counts, private_statistics={})
        if census.held[client.number] != held:
            raise FedsimError(
                f"client {client.number} holds {number_of(held, 'example')}, and the server counts "
                f"{census.held[client.number]}"
            )
        # Not Workload's, which would load and deal the data of all clients.
        Server.__init__(self, scenario, stack_name, data.without_training(), census)
        object.__setattr__(self, "dataset", data)
        object.__setattr__(self, "clients", (client,))

    def check_assumptions(self) -> None:
        """Raises a FedsimError as `Workload` does, whose message tells nothing of the data."""
        try:
            super().check_assumptions()
        except FedsimError as error:
            raise FedsimError(
                f"the data of client {self.clients[0].number} are not what the stack's claim "
                f"assumes of them: {IN_LOG}"
            ) from error
