"""The deployment engine: Flower's own, over a network of nodes that hold their own data.

The ServerApp runs in this process, and its messages go through a SuperLink (`network`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fedsim.federation.engine import FlowerEngine
from fedsim.system import paths
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.client_app import FederationJob
    from fedsim.federation.delivery import OnWait
    from fedsim.federation.deployed import Deployed
    from fedsim.federation.network.link import Link
    from fedsim.federation.server_app import OnRound
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server

_SECRET_BYTES = 32
# What Flower writes beside each tensor, or a secure sum of each client, and beside all of them.
_PART_BYTES, _AROUND_BYTES = 4096, 1 << 20


class Deployment(FlowerEngine):
    """Runs over a network: a SuperLink carries the messages of nodes that hold their own data."""

    remote: ClassVar[bool] = True

    def check(self) -> None:
        """Refuses, by a FedsimError, a version of Flower on which this engine was not tried."""
        from fedsim.federation.network import flower

        flower.check_version()

    def clients_of(
        self, scenario: Scenario, out: Path, link: Link | None, on_wait: OnWait | None
    ) -> Deployed:
        """Asks the nodes what they hold, see `FlowerEngine.clients_of`.

        A FedsimError says that nodes are missing, refuse, or cannot be reached as the scenario
        says. A resumed run keeps its secret.
        """
        from fedsim.federation.delivery import take_census
        from fedsim.federation.deployed import Deployed
        from fedsim.federation.network import flower
        from fedsim.federation.network import link as links

        if link is None:
            return Deployed.read(out)
        links.check(link.superlink, link.roots)
        eavesdropper = "eavesdropper" in scenario.observe.vantages
        if eavesdropper and scenario.federation.tls != (link.roots is not None):
            raise FedsimError(
                f"federation.tls: {str(scenario.federation.tls).lower()}, and the link to "
                f"{link.superlink} is {'plaintext' if link.roots is None else 'encrypted'}: say "
                "what the wire is that an eavesdropper listens on"
            )
        patience, settings = scenario.federation.timeout, _settings(scenario.model_dump_json())
        with flower.server_app(link, settings, patience) as (grid, _):
            census = take_census(grid, scenario.data.clients, patience, on_wait)
        path = out / "server.secret"
        # All noise then follows from the seed, as on the other engines.
        if link.shared_seed:
            return Deployed(census, None)
        # A resumed run draws the same noise: another would be a second release of its rounds.
        kept = paths.content(path, paths.TEXT) if path.exists() else None
        return Deployed(census, kept or secrets.token_bytes(_SECRET_BYTES))

    def train(
        self, job: FederationJob, server: Server, on_round: OnRound, link: Link | None
    ) -> None:
        """Trains with the nodes behind `link` (None: a FedsimError), see `FlowerEngine.train`."""
        from fedsim.federation import server_app
        from fedsim.federation.delivery import Delivery
        from fedsim.federation.deployed import NO_LINK, run_name
        from fedsim.federation.network import flower

        if link is None:
            raise FedsimError(NO_LINK)
        out = Path(job.out)
        name = run_name(out)
        held = str(list(server.census.held))
        settings = _settings(job.scenario, stack=job.stack, run=name, held=held)
        delivery = Delivery(own_machines=True, run="" if link.shared_seed else name)
        app = server_app.build(server, out, on_round, delivery)
        patience, most = server.scenario.federation.timeout, _most_bytes(server)
        with flower.server_app(link, settings, patience, most) as (grid, context):
            app(grid, context)

    def join(self, out: Path, homes: Sequence[Path]) -> int:
        """Copies the truth that nodes keep into the run in `out`; returns its number of files.

        Recordings that clients made of each other are copied, too, and not counted. If `homes` is
        empty, the nodes' folders below `out` are read. A FedsimError says that there are none, one
        is missing or another client's, or its truth differs from what was copied before.
        """
        from fedsim.recording import files, truth

        if not (out / "run").exists():
            return super().join(out, homes)
        chosen = list(homes) or sorted((out / "nodes").glob("node-*"))
        if not chosen:
            raise FedsimError(
                f"{out}: no folder of a node in it; name the nodes' folders with --from (copies "
                "will do)"
            )
        copied = 0
        for client, kept in _find_owned(out, chosen).items():
            copied += truth.copy(kept, out)
            for path in sorted(kept.glob("observations/**/*.*")):
                # What the server recorded stays; the global model is the same for all who saw it.
                there = (out / path.relative_to(kept)).exists()
                is_global = path.name == files.GLOBAL and not there
                if is_global or path.name.startswith(f"participant-{client:04d}-"):
                    files.copy_file(path, kept, out)
        return copied


def _most_bytes(server: Server) -> int:
    from fedsim.federation.secure_aggregation import plan

    parameters, buffers = server.initial()
    asked = sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values()))
    if server.protocol is not None:
        rounds = range(1, server.scenario.training.rounds + 1)
        layouts = [
            plan.layout(server, n) for n in {1, *filter(server.schedule.is_observed, rounds)}
        ]
        # Under a secure sum an answer is one masked vector of all parts.
        asked = max(len(one.sums) * one.length * one.ring_bits // 8 for one in layouts)
    parts = len(parameters) + len(buffers) + server.scenario.data.clients
    # Twice: no honest answer is refused for a few bytes, and a hostile one is bounded all the same.
    return 2 * asked + parts * _PART_BYTES + _AROUND_BYTES


def _settings(scenario: str, **of_stack: str) -> dict[str, str]:
    from fedsim.federation.wire import VERSION

    nothing = dict.fromkeys(("stack", "run", "held"), "")
    return {"version": VERSION, "scenario": scenario, **nothing, **of_stack}


def _find_owned(out: Path, homes: Sequence[Path]) -> dict[int, Path]:
    from fedsim.federation.deployed import run_name
    from fedsim.federation.network.home import run_folder
    from fedsim.recording import truth

    owned: dict[int, Path] = {}
    for home in homes:
        if not home.is_dir():
            raise FedsimError(f"--from: {home}: no such folder")
        kept = paths.refuse_links(run_folder(home, run_name(out)), home)
        client = truth.owner(kept)
        if client is None:
            continue
        # The folders of `fedsim up` say in their names whose truth may be in them.
        own = home.name.removeprefix("node-") if home.parent == out / "nodes" else str(client)
        if client in owned or own != str(client):
            raise FedsimError(
                f"--from: {home}: truth of client {client}, which is in the folder of its own node "
                "alone; name the folder of each client's node, once"
            )
        owned[client] = kept
    return owned
