"""The federation: the only part of fedsim that imports Flower.

Importing this package sets Flower's environment and imports neither Flower nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsim.federation.engine import FlowerEngine
    from fedsim.federation.network.link import Link
    from fedsim.federation.records import RoundRecord
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server

__all__ = ["build_engine", "federate"]

# Flower reads these when it is imported: it must not phone home, nor touch the user's own
# configuration, nor print its progress between ours.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ.setdefault(
    "FLWR_HOME",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim" / "flower"),
)
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")


def federate(
    scenario: Scenario,
    stack: str,
    out: Path,
    *,
    resume: bool,
    on_round: Callable[[RoundRecord], None],
    server: Server | None = None,
    link: Link | None = None,
) -> None:
    """Trains `stack` (a key of `scenario.defenses`) and records what its server sees below `out`.

    A stack that is already complete returns at once. Unless nodes draw from secrets of their own,
    the same scenario gives the same results on the same kind of processor. They are equal bit for
    bit: on every engine, on any number of cores, interrupted or not.

    Args:
        scenario: The scenario.
        stack: Name of the stack of defenses.
        out: The run's folder.
        resume: Whether results of this stack in `out` are continued; False refuses them.
        on_round: Called after each round trained in this call, in order, before its checkpoint is
            written. Rounds since the last checkpoint come again after a kill.
        server: The stack's `Server`; a `Workload`, which has the data, where clients compute in
            this process. None builds a `Workload`.
        link: Way to the nodes, for an engine whose nodes are on other machines; else None.

    Raises:
        FedsimError: The scenario is refused, the training failed, or `out` holds other results.
        OSError: The file `training.weights` is missing, or `out` cannot be written to.
    """
    from fedsim.federation import strategies
    from fedsim.federation.checkpoint import Checkpoints
    from fedsim.federation.client_app import FederationJob
    from fedsim.federation.refusals import check_scenario
    from fedsim.recording import truth
    from fedsim.system import threads
    from fedsim.training.workload import Workload
    from fedsim.types import FedsimError

    check_scenario(scenario, [stack])
    checkpoints = Checkpoints(out, scenario, stack, server.census.held if server else None)
    if not resume and (checkpoints.begun or truth.home(out, stack).exists()):
        raise FedsimError(
            f"{out} holds results of the stack {stack!r}; resume that run, or use another folder"
        )
    # Recordings that are younger than the checkpoint go, since their rounds are trained again.
    checkpoints.start()
    if checkpoints.complete:
        return
    job = FederationJob(scenario=scenario.model_dump_json(), stack=stack, out=str(out.resolve()))
    # The number of threads decides the order of summation, hence the last bits of every result.
    with strategies.quiet_flower(), threads.fix_within(scenario.threads):
        known = server or Workload(scenario, stack)
        build_engine(scenario).train(job, known, on_round, link)


def build_engine(scenario: Scenario) -> FlowerEngine:
    """Builds the engine of `scenario.federation.engine`; a FedsimError if no `FlowerEngine`."""
    from fedsim.federation.engine import FlowerEngine
    from fedsim.scenario.build import build_engine as build
    from fedsim.types import FedsimError

    engine = build(scenario.federation.engine)
    if not isinstance(engine, FlowerEngine):
        raise FedsimError(
            f"federation.engine: {scenario.federation.engine} does not derive from "
            "fedsim.federation.engine.FlowerEngine; its author has to mend it"
        )
    return engine
