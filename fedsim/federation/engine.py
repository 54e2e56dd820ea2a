"""What an engine is: a subclass of `FlowerEngine`, an entry point of the group `fedsim.engines`.

Importing this module imports nothing of Flower, so that engines are listed quickly.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.contracts.learner import Engine
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.client_app import FederationJob
    from fedsim.federation.delivery import OnWait
    from fedsim.federation.deployed import Deployed
    from fedsim.federation.network.link import Link
    from fedsim.federation.server_app import OnRound
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server


class FlowerEngine(Engine):
    """Base of engines that run the ServerApp and the ClientApps of a job to their end.

    Both apps are the same on every engine (`server_app.build`, `client_app.build`); an engine only
    decides where they run and how their messages travel. A process answers one message at a time,
    since its clients share the workload's model: several at a time take several processes.
    """

    @abstractmethod
    def train(
        self, job: FederationJob, server: Server, on_round: OnRound, link: Link | None
    ) -> None:
        """Trains the rounds of `job` that come after its last checkpoint.

        Args:
            job: Description of the training for processes of the engine.
            server: The stack's `Server`; a `Workload` unless the engine is remote.
            on_round: Called after each round with its record, before a checkpoint is written.
            link: Way to nodes on other machines; else None.

        Raises:
            FedsimError: The strategy failed, or nodes cannot be reached.
        """

    def clients_of(
        self, scenario: Scenario, out: Path, link: Link | None, on_wait: OnWait | None
    ) -> Deployed | None:
        """Returns what is known of clients on other machines; `Deployed.save` keeps it in `out`.

        The result is None if the clients are in this machine's processes, as by default.

        Args:
            scenario: The scenario.
            out: The run's folder.
            link: Way to ask the nodes; None reads an earlier answer from `out`. A FedsimError says
                that neither works, or that the engine has no nodes to link.
            on_wait: Called with the number of connected nodes while more have to connect, or None.
        """
        if link is not None:
            raise FedsimError("--superlink: this engine has no nodes elsewhere; leave it out")
        return None

    def join(self, out: Path, homes: Sequence[Path]) -> int:
        """Copies the truth that nodes keep of a run into its folder; returns its number of files.

        `out` is the run's folder, and `homes` are the nodes'; if empty, those below `out`. A
        FedsimError says that the run has no such nodes, as by default, or a folder is no node's.
        """
        raise FedsimError(f"{out}: no deployed run, so that there is nothing to collect")


class Local(FlowerEngine):
    """Runs all clients in this process, one after the other."""

    def check(self) -> None:
        """Does nothing: this engine runs on any machine."""

    def train(
        self, job: FederationJob, server: Server, on_round: OnRound, link: Link | None
    ) -> None:
        """Trains as `FlowerEngine.train` says, in this process; ignores `link`."""
        from fedsim.federation import local

        local.train(job, server, on_round)
