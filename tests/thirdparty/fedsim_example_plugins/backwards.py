"""An engine of somebody else: it needs no machine but this one, and asks the last client first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flwr.app import Message

from fedsim.federation import client_app, server_app
from fedsim.federation.client_app import FederationJob
from fedsim.federation.engine import FlowerEngine
from fedsim.federation.local import LocalGrid, run_server
from fedsim.federation.network.link import Link
from fedsim.federation.server_app import OnRound
from fedsim.training.server import Server


class BackwardsGrid(LocalGrid):
    """Works off a round's messages in reverse order."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        return super().pull_messages(reversed(list(message_ids)))


class Backwards(FlowerEngine):
    """Runs all clients in this process, the last one first."""

    def check(self) -> None:
        """Any machine will do."""

    def train(
        self, job: FederationJob, server: Server, on_round: OnRound, link: Link | None
    ) -> None:
        workload = job.workload()
        federation = workload.scenario
        clients = client_app.build(job, workload)
        run_server(
            server_app.build(workload.server(), Path(job.out), on_round),
            BackwardsGrid(clients, federation.data.clients, federation.federation.timeout),
        )
