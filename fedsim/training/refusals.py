"""What of a defense stack's federation cannot work: refused before any training starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.models.base import size_of
from fedsim.models.planting import plants
from fedsim.models.size import check_batch
from fedsim.system import memory
from fedsim.training.blame import blaming
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, Table
from fedsim.words import number_of


def check(workload: Workload) -> None:
    """Refuse what cannot work.

    Raises:
        FedsimError: a client holds less data than a batch, a round observes nobody, weights to
            start from do not fit, the data contradict what a claim assumes of them, or the stack
            cannot handle the model; the message starts with the scenario's key.
    """
    _classes(workload)
    _planted(workload)
    _observed(workload)
    _looked(workload)
    _batches(workload)
    _enough(workload)
    _assumed(workload)
    _memory(workload)
    parameters, buffers = workload.initial()
    with blaming(f"defenses.{workload.stack_name}"):
        # Two steps show what many would: an epoch of them takes minutes.
        workload.clients[0].update(workload, 1, parameters, buffers, {}, most_steps=2)
        _directed(workload)


def _directed(workload: Workload) -> None:
    """A learner that takes no step through the stack is not protected by what acts on steps."""
    stack = workload.stack
    claimed = stack.training_defenses and stack.guarantees(workload.declared)[0].mechanism
    if claimed and not stack.directed:
        raise FedsimError(
            f"learner {workload.scenario.learner.name} took its steps without `Stack.gradient`, so "
            "that no defense of training acts on them; drop these defenses, or mend the learner"
        )


def _classes(workload: Workload) -> None:
    """Images of one class have nothing to tell apart: no loss, no gradient, nothing to attack."""
    dataset = workload.dataset
    if isinstance(dataset, Dataset) and len(dataset.classes) < 2:
        raise FedsimError(
            f"data.source: all {number_of(len(dataset.train_labels), 'image')} are of one class, "
            "so that a classifier learns nothing; put images of other classes into folders of "
            "their own, or name their classes in a CSV (`labels`)"
        )


def _planted(workload: Workload) -> None:
    observe = workload.scenario.observe
    if observe.plant and not observe.batch_sizes:
        raise FedsimError("observe.plant: probes are planted for; set observe.batch_sizes")
    if observe.plant and not (workload.model and plants(workload.model)):
        raise FedsimError(
            "observe.plant: the model has no neurons for the server to plant; set "
            "model.head.planted or model.imprint"
        )


def _enough(workload: Workload) -> None:
    """Clients that share their noise have to take part together."""
    least, sampled = workload.stack.least_clients, len(workload.plan(1).participants)
    if sampled < least:
        raise FedsimError(
            f"defenses.{workload.stack_name}: the noise is shared among "
            f"{number_of(least, 'client')}, and "
            f"{sampled} take part in a round; share it among those, or raise data.clients or "
            "federation.participation"
        )
    if 1 < least < sampled and workload.protocol and workload.sum_terms(None).colluding:
        raise FedsimError(
            f"defenses.{workload.stack_name}: the noise is shared among {least} of the "
            f"{number_of(sampled, 'client')} that take part in a round, of whom a share may "
            "collude, as many as add it; share it among all"
        )


_STEP_BYTES = 4
"""Of a pixel of a batch that waits for its step."""


def _memory(workload: Workload) -> None:
    """Batches and their gradients have to fit, of training and of probes."""
    spec, observe = workload.spec, workload.scenario.observe
    if spec is None or not workload.trains:
        return
    counted = size_of(spec)
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


def _assumed(workload: Workload) -> None:
    with blaming(f"defenses.{workload.stack_name}"):
        workload.check_assumptions()


def _observed(workload: Workload) -> None:
    scenario = workload.scenario
    if not workload.trains and not scenario.observe.batch_sizes:
        return
    if scenario.observe.vantages == ["client"]:
        return
    for round in sorted({r for r in scenario.observe.rounds if isinstance(r, int)}):
        if not workload.plan(round).observed:
            raise FedsimError(
                f"observe.clients: none of them takes part in round {round} "
                f"(participation {scenario.federation.participation}, seed "
                f"{scenario.seed}); observe 'all' or set observe.batch_sizes"
            )


def _looked(workload: Workload) -> None:
    """Somebody has to look, at others, and the global models have to tell."""
    scenario = workload.scenario
    if "client" not in scenario.observe.vantages:
        return
    for round in sorted({r for r in scenario.observe.rounds if isinstance(r, int)}):
        if len(workload.plan(round).participants) < 2:
            raise FedsimError(
                "observe.vantages: one client takes part in a round, and client sees the others; "
                "raise data.clients or federation.participation"
            )
        if not workload.plan(round).lookers:
            raise FedsimError(
                f"observe.clients: to look at round {round} (observe.vantages: client), a client "
                f"has to take part in rounds {round} and {round + 1}, and none of them does "
                f"(participation {scenario.federation.participation}, seed {scenario.seed}); "
                "observe 'all', or raise federation.participation"
            )
    parameters, _ = workload.initial()
    with blaming("observe.vantages"):
        for value in parameters.values():
            workload.computation.told_update(value, value, workload.training)


def _batches(workload: Workload) -> None:
    observe, parts = workload.scenario.observe, {one.number: one.own for one in workload.clients}
    of = "row" if isinstance(workload.dataset, Table) else "image"
    everyone = list(parts)
    sizes = []
    if workload.trains:
        sizes += [("training.local.batch_size", workload.training.batch_size, everyone)]
    if observe.batch_sizes:
        named = [] if observe.clients == "all" else observe.clients
        seen = everyone if workload.stack.aggregation else named or everyone
        seen = [client for client in seen if client in parts]
        sizes += [("observe.batch_sizes", size, seen) for size in observe.batch_sizes]
    for key, size, clients in sizes:
        smallest = min(clients, key=lambda client: len(parts[client]), default=None)
        if smallest is not None and size > len(parts[smallest]):
            raise FedsimError(
                f"{key}: a batch of {size} is larger than the data of client {smallest} "
                f"({number_of(len(parts[smallest]), of)}); use a smaller batch, fewer clients, "
                "or a more even partition"
            )
    if observe.batch_sizes:
        _victims(workload, observe.batch_sizes, seen)


def _victims(workload: Workload, sizes: Sequence[int], clients: Sequence[int]) -> None:
    """Trials repeat nothing: each has images of its own."""
    with blaming("observe.trials"):
        for size in sizes:
            training = workload.stack.training(workload.declared_of(size))
            for client in clients:
                workload.client(client).check_victims(training, workload.scenario.observe.trials)
