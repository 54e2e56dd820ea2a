"""Which engine carries a federation's messages, and what is refused before one starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from fedsim.federation import client_state, strategies
from fedsim.federation.checkpoint import Checkpoints
from fedsim.federation.client_app import Job
from fedsim.federation.network.link import Link
from fedsim.federation.server_app import OnRound
from fedsim.scenario import Scenario
from fedsim.scenario.build import build_learner, build_stack, declared_training
from fedsim.system import threads
from fedsim.training.server import Server
from fedsim.types import FedsimError


class Engine(Protocol):
    """A module of this room that runs the ServerApp and the ClientApps of a job to their end.

    `federation.engine` calls it by its name. Both apps are the same on every engine; an engine
    only decides where they run and how their messages travel.

    A process answers one message at a time: its clients share the workload's model, which holds the
    weights of the one that answers. Several clients at a time take several processes, not threads.
    """

    def check(self) -> None:
        """Refuse a machine on which it cannot run.

        Raises:
            FedsimError: this is one.
        """

    def run(self, job: Job, server: Server | None, on_round: OnRound, link: Link | None) -> None:
        """Train what is left of `job`.

        Args:
            job: What to train.
            server: May spare building it.
            on_round: Told of each round.
            link: Where the messages go, of an engine whose nodes are elsewhere.
        """


def _named(name: str) -> Engine:
    return cast(Engine, import_module(f"fedsim.federation.{name}"))


def run(
    scenario: Scenario,
    stack: str,
    out: Path,
    *,
    resume: bool,
    on_round: OnRound,
    server: Server | None = None,
    link: Link | None = None,
) -> None:
    """See `fedsim.federation.federate`."""
    check(scenario, [stack])
    held = server.census.held if server else None
    checkpoints = Checkpoints(out, scenario, stack, held)
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
        _named(scenario.federation.engine).run(job, server, on_round, link)


def check(scenario: Scenario, stacks: list[str] | None = None) -> None:
    """See `fedsim.federation.check`; `stacks` limits it to some of the scenario's."""
    federation = scenario.federation
    _named(federation.engine).check()
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
