"""What cannot work is refused here before any training: the questions, in their order.

Sections of a scenario that contradict each other are refused when it is read (`scenario.checks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from fedsim.contracts.attack import Attack, images_alone
from fedsim.contracts.plugins import load_as
from fedsim.federation import strategies
from fedsim.federation.secure_aggregation import plan
from fedsim.models.base import size_of
from fedsim.models.head import plants
from fedsim.models.size import check_batch
from fedsim.scenario import Scenario, build_stack, declared_training
from fedsim.scenario.build import build_engine, build_learner
from fedsim.scenario.document import blaming
from fedsim.system import memory
from fedsim.training import accounting
from fedsim.training.server import Server
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, PrivacyClaim
from fedsim.words import number_of

Claims = Mapping[str, PrivacyClaim]
"""Privacy claim that the ledger states of each stack, by name of the stack."""


def check_scenario(scenario: Scenario, stacks: Collection[str] | None = None) -> None:
    """Refuses, by a FedsimError, an engine or a strategy that cannot work with the scenario.

    The strategy has to fit `stacks`, by name; None means all of `scenario.defenses`.
    """
    for ask in OF_SCENARIO:
        ask(scenario, scenario.defenses if stacks is None else stacks)


def check(server: Server) -> None:
    """Refuses, by a FedsimError, a stack that cannot work.

    Of a `Workload` its data are checked, too, and client 0 trains for at most two steps.
    """
    for ask in OF_STACK:
        ask(server)
    if isinstance(server, Workload):
        for ask_clients in OF_CLIENTS:
            ask_clients(server)


def check_run(scenario: Scenario, servers: Mapping[str, Server], claims: Claims) -> None:
    """Refuses, by a FedsimError, an audit without a claim to refute, and unreadable LPIPS weights.

    `servers` and `claims` are those of all stacks, by name of the stack.
    """
    for ask in OF_RUN:
        ask(scenario, servers, claims)


# Of a scenario.


def _engine_runs_here(scenario: Scenario, stacks: Collection[str]) -> None:
    build_engine(scenario.federation.engine).check()


def _strategy_fits(scenario: Scenario, stacks: Collection[str]) -> None:
    """Refuses a strategy with wrong parameters, or one that needs what a stack hides."""
    federation, trains = scenario.federation, build_learner(scenario.learner).trains
    # Building it checks its parameters.
    with strategies.quiet_flower():
        built = strategies.build(federation.strategy, federation.strategy_parameters)
    last = strategies.rounds_within_budget(built, scenario.training.rounds)
    asked = [scenario.training.rounds if r == "last" else r for r in scenario.observe.rounds]
    if not last or (scenario.attacks and max(asked) > last):
        raise FedsimError(
            f"observe.rounds: the accountant of {federation.strategy} stops training after round "
            f"{last}, and round {max(asked)} is to be attacked; lower observe.rounds or "
            "training.rounds, or raise accountant.max_epsilon or noise_multiplier"
        )
    if not trains and federation.strategy != "FedAvg":
        raise FedsimError(
            f"federation.strategy: learner {scenario.learner.name} releases no update of a model, "
            f"of which {federation.strategy} could make anything but the mean; use FedAvg"
        )
    training = declared_training(scenario.training)
    if federation.clips_at_clients and training.algorithm != "fedavg":
        raise FedsimError(
            f"federation.strategy: clients of {federation.strategy} clip changes of weights, and "
            "training.algorithm is fedsgd; set it to fedavg"
        )
    # The strategy is handed weights, which a gradient moves by the learning rate. No round has a
    # larger one; a small one is no reason to clip less.
    rate = max(1.0, training.lr) if training.algorithm == "fedsgd" else 1.0
    for name in stacks:
        stack = build_stack(scenario.defenses[name])
        with blaming(f"defenses.{name}"):
            strategies.check_fit(
                federation.strategy,
                federation.strategy_parameters,
                sees_each=stack.aggregation is None,
                losses=trains and stack.shows_losses(training),
                bound=stack.guarantees(training)[-1].sensitivity if trains else math.inf,
                rate=rate,
            )


OF_SCENARIO: list[Callable[[Scenario, Collection[str]], None]] = [_engine_runs_here, _strategy_fits]


# Of a stack, whoever computes its clients.


def _wrapper_knows_its_round(server: Server) -> None:
    parameters = server.scenario.federation.strategy_parameters
    strategies.check_sampled(parameters, len(server.plan(1).participants))


def _neurons_to_plant(server: Server) -> None:
    """Refuses to plant neurons (`observe.plant`) without probes, or in a model that has none."""
    observe = server.scenario.observe
    if observe.plant and not observe.batch_sizes:
        raise FedsimError("observe.plant: probes are planted for; set observe.batch_sizes")
    if observe.plant and not (server.model and plants(server.model)):
        raise FedsimError(
            "observe.plant: the model has no neurons for the server to plant; set "
            "model.head.planted or model.imprint"
        )


def _somebody_is_observed(server: Server) -> None:
    scenario = server.scenario
    if not server.schedule.records or scenario.observe.vantages == ["client"]:
        return
    for round in sorted({r for r in scenario.observe.rounds if isinstance(r, int)}):
        if not server.plan(round).observed:
            raise FedsimError(
                f"observe.clients: none of them takes part in round {round} "
                f"(participation {scenario.federation.participation}, seed "
                f"{scenario.seed}); observe 'all' or set observe.batch_sizes"
            )


def _somebody_looks(server: Server) -> None:
    """Refuses the vantage `client` if no client sees others, or if global models tell no update."""
    scenario = server.scenario
    if "client" not in scenario.observe.vantages:
        return
    for round in sorted({r for r in scenario.observe.rounds if isinstance(r, int)}):
        if len(server.plan(round).participants) < 2:
            raise FedsimError(
                "observe.vantages: one client takes part in a round, and client sees the others; "
                "raise data.clients or federation.participation"
            )
        if not server.plan(round).lookers:
            raise FedsimError(
                f"observe.clients: to look at round {round} (observe.vantages: client), a client "
                f"has to take part in rounds {round} and {round + 1}, and none of them does "
                f"(participation {scenario.federation.participation}, seed {scenario.seed}); "
                "observe 'all', or raise federation.participation"
            )
    parameters, _ = server.initial()
    with blaming("observe.vantages"):
        for value in parameters.values():
            # It raises if global models do not tell the update; the values do not matter here.
            server.computation.told_update(value, value, server.training)


def _enough_share_the_noise(server: Server) -> None:
    """Refuses noise shared among clients where the honest ones may add too little of it."""
    least, sampled = server.stack.least_clients, len(server.plan(1).participants)
    if sampled < least:
        raise FedsimError(
            f"defenses.{server.stack_name}: the noise is shared among "
            f"{number_of(least, 'client')}, and "
            f"{sampled} take part in a round; share it among those, or raise data.clients or "
            "federation.participation"
        )
    if 1 < least < sampled and server.protocol and server.sum_terms(None).colluding:
        raise FedsimError(
            f"defenses.{server.stack_name}: the noise is shared among {least} of the "
            f"{number_of(sampled, 'client')} that take part in a round, of whom a share may "
            "collude, as many as add it; share it among all"
        )


OF_STACK: list[Callable[[Server], None]] = [
    _wrapper_knows_its_round,
    _neurons_to_plant,
    _somebody_is_observed,
    _somebody_looks,
    _enough_share_the_noise,
    plan.check,
    accounting.check_promise,
]


# Of a stack and the data of its clients that compute here.


def _classes_to_tell_apart(workload: Workload) -> None:
    dataset = workload.dataset
    if dataset.noun == "image" and len(dataset.classes or ()) < 2:
        raise FedsimError(
            f"data.source: all {number_of(len(dataset.train_labels), 'image')} are of one class, "
            "so that a classifier learns nothing; put images of other classes into folders of "
            "their own, or name their classes in a CSV (`labels`)"
        )


def _attacks_answer(workload: Workload) -> None:
    if workload.spec is None or not workload.spec.columns:
        return
    for index, entry in enumerate(workload.scenario.attacks):
        attack = load_as("fedsim.attacks", entry.name, (Attack,))
        if not attack.takes_rows:
            raise FedsimError(f"attacks[{index}]: {images_alone(entry.name)}")


def _batches_are_full(workload: Workload) -> None:
    """Refuses batches larger than a client's data, and trials that would repeat images."""
    observe, parts = workload.scenario.observe, {one.number: one.own for one in workload.clients}
    everyone = list(parts)
    sizes, trains = [], workload.release is None
    if trains:
        sizes += [("training.local.batch_size", workload.training.batch_size, everyone)]
    named = everyone if observe.clients == "all" else observe.clients
    # Where the stack combines updates, probes go to every participant and not to the named alone.
    seen = everyone if workload.stack.aggregation else [one for one in named if one in parts]
    sizes += [("observe.batch_sizes", size, seen) for size in observe.batch_sizes or []]
    for key, size, clients in sizes:
        smallest = min(clients, key=lambda client: len(parts[client]), default=None)
        if smallest is not None and size > len(parts[smallest]):
            raise FedsimError(
                f"{key}: a batch of {size} is larger than the data of client {smallest} "
                f"({number_of(len(parts[smallest]), workload.dataset.noun)}); use a smaller batch, "
                "fewer clients, or a more even partition"
            )
    with blaming("observe.trials"):
        for size in (observe.batch_sizes or []) if trains else []:
            training = workload.stack.training(workload.declared.as_probed(size))
            for client in seen:
                workload.client(client).check_victims(training, observe.trials)


def _data_keep_to_the_claim(workload: Workload) -> None:
    with blaming(f"defenses.{workload.stack_name}"):
        workload.check_assumptions()


# Bytes of one pixel of a batch that waits for its step.
_STEP_BYTES = 4


def _batches_fit_memory(workload: Workload) -> None:
    spec, observe = workload.spec, workload.scenario.observe
    if spec is None:
        return
    counted = size_of(spec, workload.stack.model_defenses)
    training = workload.training
    check_batch(counted, "training.local.batch_size", training.batch_size, workload.device)
    for number in observe.batch_sizes or []:
        check_batch(counted, "observe.batch_sizes", number, workload.device)
    largest = max([training.batch_size, *(observe.batch_sizes or [])])
    pixels = _STEP_BYTES * math.prod(spec.input_shape)
    memory.check(
        2 * pixels * largest * training.steps,
        f"training.local.steps: {number_of(training.steps, 'batch', 'batches')} of "
        f"{number_of(largest, 'image')}",
        "use fewer steps or smaller batches",
    )


def _a_client_can_train(workload: Workload) -> None:
    """Trains one client for at most two steps, and refuses a scenario in which that fails."""
    stack = workload.stack
    parameters, buffers = workload.initial()
    with blaming(f"defenses.{workload.stack_name}"):
        workload.clients[0].update(workload, 1, parameters, buffers, {}, most_steps=2)
        claimed = stack.training_defenses and stack.guarantees(workload.declared)[0].mechanism
        if claimed and not stack.directed:
            raise FedsimError(
                f"learner {workload.scenario.learner.name} took its steps without "
                "`Stack.gradient`, so that no defense of training acts on them; drop these "
                "defenses, or mend the learner"
            )


OF_CLIENTS: list[Callable[[Workload], None]] = [
    _classes_to_tell_apart,
    _attacks_answer,
    _batches_are_full,
    _data_keep_to_the_claim,
    _batches_fit_memory,
    _a_client_can_train,
]


# Of all stacks, and what they claim.


def _audit_shows_something(
    scenario: Scenario, servers: Mapping[str, Server], claims: Claims
) -> None:
    if scenario.audit:
        from fedsim import audit

        audit.check(scenario.audit, claims, scenario.data.clients)


def _scorer_is_there(scenario: Scenario, servers: Mapping[str, Server], claims: Claims) -> None:
    from fedsim import scoring

    wanted, described = scenario.scoring, next(iter(servers.values())).described
    if wanted.lpips_weights is not None and described.noun == "image":
        lpips = scoring.load_lpips(wanted.lpips_backbone, wanted.lpips_weights)
        if isinstance(lpips, scoring.Unavailable):
            raise FedsimError(f"scoring.lpips_weights: {lpips.reason}")


OF_RUN: list[Callable[[Scenario, Mapping[str, Server], Claims], None]] = [
    _audit_shows_something,
    _scorer_is_there,
]
