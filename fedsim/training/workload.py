"""One defense stack's federation with its clients' data: whoever computes as a client holds it.

A `Workload` is built from (scenario, stack name) alone, so every process that runs clients builds
the same one. All batches are functions of (seed, round, client) and not of the stack: every defense
is attacked on the same victims.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedsim import rng
from fedsim.data.partition import partition
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_learner, declared_training
from fedsim.training.blame import blaming
from fedsim.training.census import Census
from fedsim.training.client import Client, ClientResult
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.training.source import data_source, load_dataset, private_statistics
from fedsim.types import Dataset, Table, Tensors


@dataclass(frozen=True, eq=False, init=False)
class Workload(Server):
    """What the clients of one defense stack's federation compute from their data.

    It knows all that the server knows, and is never handed to it (`server`).
    """

    dataset: Dataset | Table = field(init=False)
    """What all clients hold together, and the test split."""
    clients: tuple[Client, ...] = field(init=False)
    """By their numbers."""

    def __init__(
        self, scenario: Scenario, stack_name: str, dataset: Dataset | Table | None = None
    ) -> None:
        """`dataset` spares loading the source again.

        Raises:
            FedsimError: the data is missing or not what the learner takes, the partition is
                impossible, or the model does not fit the images.
        """
        data = load_dataset(scenario) if dataset is None else dataset
        trains = build_learner(scenario.learner).trains
        with blaming("data.partition"):
            parts = partition(
                data,
                scenario.data.partition,
                scenario.data.clients,
                rng.derive(scenario.seed, "partition"),
                min_images=declared_training(scenario).batch_size if trains else 1,
            )
        census = Census(
            held=[len(own) for own in parts], private_statistics=private_statistics(scenario, data)
        )
        super().__init__(scenario, stack_name, data.without_training(), census)
        clients = tuple(
            Client(number=number, dataset=data, own=own, seed=scenario.seed)
            for number, own in enumerate(parts)
        )
        object.__setattr__(self, "dataset", data)
        object.__setattr__(self, "clients", clients)

    def server(self) -> Server:
        """The same federation as its server knows it."""
        return Server(self.scenario, self.stack_name, self.described, self.census)

    @property
    def parts(self) -> list[Tensor]:
        """Indices of each client's examples among those of training."""
        return [client.own for client in self.clients]

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
        """What `client` computes in `round` (`Client.update`)."""
        return self.clients[client].update(self, round, parameters, buffers, state, probe=probe)

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
            self.computation.check({client: self.clients[client].held() for client in participants})
            for probe in self.schedule.probes(round):
                asked = [self.clients[client] for client in self.schedule.observed(round)]
                self.computation.check(
                    {one.number: one.rows(self.computation, round, probe)[0] for one in asked}
                )
