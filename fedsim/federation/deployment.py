"""The deployment engine: Flower's own, over a network of nodes that hold their own data.

The ServerApp runs in this process, and its messages go through a SuperLink (`network`). Nodes are
started by whoever owns their data (`fedsim node`).
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.federation import NO_LINK
from fedsim.federation.network.link import Link
from fedsim.recording.files import write_bytes
from fedsim.system import paths
from fedsim.training.census import Census
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.client_app import Job
    from fedsim.federation.delivery import OnWait
    from fedsim.federation.server_app import OnRound
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server

_RUN_BYTES = 16
_PART_BYTES, _AROUND_BYTES = 4096, 1 << 20
"""What Flower writes beside each tensor, or a secure sum of each client, and beside all of them."""


def check() -> None:
    """Refuse a Flower whose insides are not known.

    Raises:
        FedsimError: it is another version.
    """
    from fedsim.federation.network import flower

    flower.check_version()


def run(job: Job, server: Server | None, on_round: OnRound, link: Link | None = None) -> None:
    """Train what is left of `job` with the nodes behind `link`.

    Raises:
        FedsimError: there is no link, or the SuperLink or a node fails.
    """
    from fedsim.federation import server_app
    from fedsim.federation.delivery import Delivery
    from fedsim.federation.network import flower
    from fedsim.federation.wire import VERSION

    if link is None or server is None:
        raise FedsimError(NO_LINK)
    out = Path(job.out)
    name = run_name(out)
    settings = {
        "version": VERSION,
        "scenario": job.scenario,
        "stack": job.stack,
        "run": name,
        "held": str(list(server.census.held)),
    }
    delivery = Delivery(own_machines=True, run="" if link.shared_seed else name)
    app = server_app.build(server, out, on_round, delivery)
    patience, most = server.scenario.federation.timeout, most_bytes(server)
    with flower.server_app(link, settings, patience, most) as (grid, context):
        app(grid, context)


def most_bytes(server: Server) -> int:
    """How many bytes a client's answer may have: twice the tensors asked for, and their names."""
    from fedsim.federation.secure_aggregation import plan

    parameters, buffers = server.initial()
    asked = sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values()))
    if server.protocol is not None:
        rounds = range(1, server.scenario.training.rounds + 1)
        layouts = [
            plan.layout(server, n) for n in {1, *filter(server.schedule.is_observed, rounds)}
        ]
        asked = max(len(one.sums) * one.length * one.ring_bits // 8 for one in layouts)
    parts = len(parameters) + len(buffers) + server.scenario.data.clients
    return 2 * asked + parts * _PART_BYTES + _AROUND_BYTES


def take_census(scenario: Scenario, link: Link, on_wait: OnWait | None = None) -> Census:
    """Ask the nodes behind `link` how much each holds, and whether they would answer at all.

    `on_wait` is told how many are there while more have to come.

    Raises:
        FedsimError: a client has no node or two, or a node refuses, with its reason.
    """
    from fedsim.federation.network import census, flower
    from fedsim.federation.wire import VERSION

    written = scenario.model_dump_json()
    settings = {"version": VERSION, "scenario": written, "stack": "", "run": "", "held": ""}
    with flower.server_app(link, settings, scenario.federation.timeout) as (grid, _):
        return census.take(grid, scenario.data.clients, scenario.federation.timeout, on_wait)


def run_name(out: Path) -> str:
    """Return what nodes know the run in `out` by: drawn once, and kept there."""
    path = out / "run"
    if not path.exists():
        write_bytes(path, secrets.token_hex(_RUN_BYTES).encode())
    return paths.text(path, paths.TEXT).strip()
