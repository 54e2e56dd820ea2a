"""One canary in many trainings of one client, and in as many it does not take part."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim import rng
from fedsim.canaries.contribution import Contributions, along, images, other_label
from fedsim.defense import NoisyAggregation
from fedsim.models.local import mean_gradient_factor
from fedsim.privacy import participation
from fedsim.types import Relation, Tensors, Unit, Update
from fedsim.workload import Workload


def scores(
    workload: Workload,
    unit: Unit,
    relation: Relation,
    taken: Collection[tuple[int, ...]],
    canaries: int,
    on_progress: Callable[[int, int], None],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """((canaries,) without the canary, (canaries,) with it): what is seen along its direction.

    It takes part as the client that is worst off among those whose rounds are `taken`: the one with
    the most, or, where the server's own noise goes on while it is away, the one that is farthest
    from not taking part at all. `on_progress` is told (trainings done, of how many).

    Raises:
        FedsimError: training is impossible.
    """

    def draw(present: bool) -> NDArray[np.float64]:
        def on_trial(done: int) -> None:
            on_progress(int(present) * canaries + done, 2 * canaries)

        if unit == "client":
            return _of_client(workload, present, taken, canaries, on_trial)
        rounds = max(map(len, taken))
        return _of_example(workload, relation, present, rounds, canaries, on_trial)

    return draw(False), draw(True)


def _of_client(
    workload: Workload,
    present: bool,
    taken: Collection[tuple[int, ...]],
    canaries: int,
    on_trial: Callable[[int], None],
) -> NDArray[np.float64]:
    """(canaries,) of a client that sends the same update whenever asked, or noise alone."""
    stack, declared = workload.stack, workload.declared
    seed = workload.scenario.seed
    toward = Contributions(workload).client_update()
    away = {name: torch.zeros_like(value) for name, value in toward.items()}
    update = dict(toward if present else away)
    rounds, weights = _asked(workload, taken)
    scores = np.zeros(canaries)
    canary = copy(workload)
    for trial in range(canaries):
        server = rng.derive(seed, "canary", int(present), trial)
        canary.scenario = workload.scenario.model_copy(update={"seed": server})
        state = stack.init(update, declared)
        for round, weight in enumerate(weights, 1):
            released: Tensors = away
            if round in rounds:
                noise = rng.generator(seed, "canary", int(present), trial, round)
                released, state = stack.apply(update, state, noise)
            if weight:
                scores[trial] += weight * along(_seen(canary, released, round), toward)
        on_trial(trial + 1)
    return scores


def _asked(
    workload: Workload, taken: Collection[tuple[int, ...]]
) -> tuple[frozenset[int], NDArray[np.float64]]:
    """The worst client's rounds, and what each counts: as it is most likely to be noticed.

    Against noise C^-1 Z, who takes part as z says is told best by <C z, C y> of what is seen, y.
    """
    if not isinstance(workload.stack.aggregation, NoisyAggregation):
        most = max(map(len, taken))
        return frozenset(range(1, most + 1)), np.ones(most)
    mechanism = workload.stack.guarantees(workload.declared)[-1].mechanism
    correlation = getattr(mechanism, "correlation", 0.0)
    ordered, past = sorted(taken), range(1, workload.scenario.training.rounds + 1)
    present = np.array([[round in each for round in past] for each in ordered])
    moved = participation.seen(present, correlation)  # C z of each
    farthest = int(np.linalg.norm(moved, axis=1).argmax())
    weights = participation.seen(moved[farthest, None, ::-1], correlation)[0, ::-1]  # C'C z
    return frozenset(ordered[farthest]), weights


def _of_example(
    workload: Workload,
    relation: Relation,
    present: bool,
    rounds: int,
    canaries: int,
    on_trial: Callable[[int], None],
) -> NDArray[np.float64]:
    """(canaries,) of a client with one example that matters.

    Under `replace_one` all of its examples are alike, but for one label or not even that; under
    `zero_out` none is there, but for one or not even that. The client is the one with the least
    data: sampling hides its examples least.
    """
    data = images(workload)
    part = min(workload.parts, key=len)
    image, label = data.train_images[part[:1]], data.train_labels[part[0]]
    other = other_label(data, label)
    contributions = Contributions(workload)
    toward = contributions.unit_gradient(image, other)
    labels = label.repeat(len(part))
    canary = copy(workload)
    canary.parts = [torch.arange(len(part))]
    if relation == "zero_out":
        labels[0] = other
        canary.withheld = torch.arange(len(part)) >= int(present)
    else:
        labels[0] = other if present else label
        before = contributions.unit_gradient(image, label)
        toward = {name: value - before[name] for name, value in toward.items()}
    canary.dataset = replace(
        data,
        train_images=image.expand(len(part), *data.input_shape),
        train_labels=labels,
    )
    sign = mean_gradient_factor(workload.training)
    scores = np.zeros(canaries)
    for trial in range(canaries):
        seed = rng.derive(workload.scenario.seed, "canary", int(present), trial)
        canary.scenario = workload.scenario.model_copy(update={"seed": seed})
        state: Tensors = {}
        for round in range(1, rounds + 1):
            result = canary.client_update(0, round, *contributions.start, state)
            state = result.state
            scores[trial] += sign * along(_seen(canary, result.update.tensors, round), toward)
        on_trial(trial + 1)
    return scores


def _seen(workload: Workload, released: Tensors, round: int) -> Tensors:
    """What the server sees of it, if it knows what all others sent."""
    if workload.stack.aggregation is None:
        return released
    return workload.combined([Update(tensors=released, num_examples=1)], round).tensors
