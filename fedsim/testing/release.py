"""Honest releases of closed-form learners with their truth, without a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim import rng
from fedsim.learners.base import Problem, Request
from fedsim.recording import observation_id
from fedsim.scenario.build import build_learner, build_stack, declared_training
from fedsim.scenario.model import Data, PluginRef, Scenario
from fedsim.types import Observation, RowTruth, Table, Update


def make_release(
    rows: Tensor,
    members: Tensor,
    *,
    learner: str = "sketch",
    parameters: Mapping[str, Any] | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    intercept: bool = True,
    classes: tuple[str, ...] | None = None,
    row_norm: float | None = None,
    seed: int = 0,
) -> tuple[Observation, RowTruth]:
    """What a server sees of clients who release from the `members` among `rows`, and the truth.

    The clients run the learner of a real run. `rows` (N, d + 1) are features and target in [-1, 1],
    no longer than `row_norm` (default: sqrt(d + 1)): those of the first client, then of the second,
    as many of each; `members` (N,) bool are those that take part. `defense` lists defenses as a
    scenario does; several clients take an aggregation defense that combines them. With `intercept`
    the last feature is the constant 1; with `classes` the target is -1 or +1. `seed` draws the
    random matrices and the defenses' noise.

    Raises:
        PluginError: the learner or a defense is not installed.
        FedsimError: they do not fit each other.
        ValueError: several clients' releases are not combined.
    """
    stack = build_stack([_reference(member) for member in defense])
    if num_clients > 1 and stack.aggregation is None:
        raise ValueError("several clients' releases need an aggregation defense to combine them")
    size = rows.shape[1]
    table = Table(
        name="example",
        train_rows=rows,
        train_labels=torch.zeros(len(rows), dtype=torch.int64),
        test_rows=rows,
        columns=tuple(f"column {i}" for i in range(size)),
        row_norm=math.sqrt(size) if row_norm is None else row_norm,
        classes=classes,
        intercept=intercept,
    )
    scenario = Scenario(
        name="example",
        data=Data(source=PluginRef(name="example"), clients=num_clients),
        learner=PluginRef(name=learner, parameters=dict(parameters or {})),
        attacks=[],
    )
    problem = Problem(scenario=scenario, stack=stack, dataset=table, device=torch.device("cpu"))
    computation = build_learner(scenario.learner).start(problem)
    before, _ = computation.initial()
    declared = declared_training(scenario)
    updates = []
    for client, own in enumerate(torch.arange(len(rows)).chunk(num_clients)):
        kept = own[members[own]]
        stream = rng.generator(seed, "defense", client)
        request = Request(
            batches=[(rows[kept], table.train_labels[kept])],
            parameters=before,
            buffers={},
            training=declared,
            seed=rng.derive(seed, "learner", client),
            recorded=True,
        )
        released = computation.compute(request, stream).update
        state = stack.init(released, declared, computation.release)
        defended, _ = stack.apply(released, state, stream)
        updates.append(Update(tensors=defended, num_examples=1))
    seen = stack.aggregation.combine(updates) if stack.aggregation else updates[0]
    spec = computation.describe()
    assert spec is not None
    client = -1 if stack.aggregation else 0
    scored = torch.ones(size, dtype=torch.bool)
    scored[-2] = not intercept
    observation = Observation(
        id=observation_id("example", 1, client, "training"),
        update=seen.tensors,
        buffers_update={},
        parameters=before,
        buffers={},
        spec=spec,
        training=declared,
        defense=tuple(dict(member) for member in defense),
        vantage=stack.vantage,
        round=1,
        client=client,
        num_clients=num_clients,
        trial=0,
        seed=seed,
    )
    clients = torch.cat(
        [
            torch.full((len(own),), client)
            for client, own in enumerate(torch.arange(len(rows)).chunk(num_clients))
        ]
    )
    truth = RowTruth(rows=rows.clone(), members=members.clone(), clients=clients, scored=scored)
    return observation, truth


def example_rows(count: int, columns: int = 4) -> tuple[Tensor, Tensor]:
    """`count` rows (count, columns) float64, uniform in [-1, 1] but for a constant feature 1 before
    the target; and which of them take part, (count,) bool: two of three."""
    stream = rng.generator(0, "example rows")
    rows = torch.rand(count, columns, generator=stream, dtype=torch.float64) * 2 - 1
    rows[:, -2] = 1
    return rows, torch.arange(count) % 3 > 0


def _reference(member: Mapping[str, Any]) -> PluginRef:
    parameters = {key: value for key, value in member.items() if key != "name"}
    return PluginRef(name=member["name"], parameters=parameters)
