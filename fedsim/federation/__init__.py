"""The federation: the only part of fedsim that imports Flower.

`federate` trains one defense stack as a Flower ServerApp and ClientApps and records what the server
sees. Importing this package sets Flower's environment and imports nothing of Flower itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.federation.records import RoundRecord
from fedsim.types import FedsimError

if TYPE_CHECKING:
    from fedsim.federation.engine import FlowerEngine
    from fedsim.federation.network.link import Link
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server

__all__ = ["RoundRecord", "build_engine", "check", "check_sums", "federate"]

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
    """Train `stack` (a key of `scenario.defenses`) and record what its server sees below `out`.

    `on_round` is called after each round trained in this call, in order, before the round's
    checkpoint is written: after a kill, the rounds since the last checkpoint come again, and the
    last report of each counts. A stack that is already complete returns at once. Same scenario,
    same kind of processor: same results, bit for bit, on every engine and any number of cores,
    interrupted or not. `server` spares building it again; where clients compute in this process, it
    is a workload. `link` is for an engine whose nodes are elsewhere.

    Raises:
        FedsimError: see `check`; or `out` holds results of this stack and `resume` is false, or of
            another scenario; or the engine cannot run here; or the strategy failed.
    """
    from fedsim.federation import client_state
    from fedsim.federation.checkpoint import Checkpoints
    from fedsim.federation.client_app import Job
    from fedsim.system import threads
    from fedsim.training.workload import Workload

    check(scenario, [stack])
    checkpoints = Checkpoints(out, scenario, stack, server.census.held if server else None)
    if not resume and (checkpoints.begun or client_state.has_truth(out, stack)):
        raise FedsimError(
            f"{out} holds results of the stack {stack!r}; resume that run, or use another folder"
        )
    checkpoints.start()
    if checkpoints.complete:
        return
    job = Job(
        scenario=scenario.model_dump_json(),
        stack=stack,
        out=str(out.resolve()),
        threads=scenario.threads,
    )
    with _quiet_flower(), threads.fixed(scenario.threads):
        known = server or Workload(scenario, stack)
        build_engine(scenario).train(job, known, on_round, link)


def build_engine(scenario: Scenario) -> FlowerEngine:
    """Build the engine that `scenario` names.

    Raises:
        PluginError: it is not installed, cannot be imported, or carries no messages of Flower.
    """
    from fedsim.federation.engine import FlowerEngine
    from fedsim.scenario.build import build_engine as build

    engine = build(scenario.federation.engine)
    if not isinstance(engine, FlowerEngine):
        raise FedsimError(
            f"federation.engine: {scenario.federation.engine} does not derive from "
            "fedsim.federation.engine.FlowerEngine; its author has to mend it"
        )
    return engine


def check(scenario: Scenario, stacks: list[str] | None = None) -> None:
    """Refuse before any training what no engine, strategy or defense stack can do.

    Args:
        scenario: With every default written out.
        stacks: Those of the scenario's that are to be trained; default all.

    Raises:
        FedsimError: the strategy or one of its parameters does not exist (with the nearest name),
            does not fit a defense stack, or the engine's extra is not installed.
    """
    from fedsim.federation import strategies
    from fedsim.scenario.build import build_learner, build_stack, declared_training

    federation = scenario.federation
    build_engine(scenario).check()
    with _quiet_flower():
        strategies.build(federation.strategy, federation.strategy_parameters)
    trains = build_learner(scenario.learner).trains
    if not trains and federation.strategy != "FedAvg":
        raise FedsimError(
            f"federation.strategy: learner {scenario.learner.name} releases no update of a model, "
            f"of which {federation.strategy} could make anything but the mean; use FedAvg"
        )
    for name in scenario.defenses if stacks is None else stacks:
        stack = build_stack(scenario.defenses[name])
        try:
            strategies.check_fit(
                federation.strategy,
                federation.strategy_parameters,
                sees_each=stack.aggregation is None,
                losses=trains and stack.shows_losses(declared_training(scenario)),
            )
        except FedsimError as error:
            raise FedsimError(f"defenses.{name}: {error}") from error


@contextmanager
def _quiet_flower() -> Iterator[None]:
    """Hold Flower's log to FLWR_LOG_LEVEL also where somebody imported it before fedsim."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(os.environ["FLWR_LOG_LEVEL"].upper())
    try:
        yield
    finally:
        logger.setLevel(before)


def check_sums(server: Server) -> None:
    """Refuse before any training secure sums of `server`'s stack that cannot work.

    Raises:
        FedsimError: see `fedsim.federation.secure_aggregation.plan.check`.
    """
    from fedsim.federation.secure_aggregation import plan

    plan.check(server)
