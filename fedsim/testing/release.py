"""Makes honest releases of closed-form learners with their truth, without a federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.learner import Request
from fedsim.contracts.stack import Stack
from fedsim.learners.sgd import as_pixels
from fedsim.recording.files import observation_id
from fedsim.scenario.build import (
    announced,
    build_learner,
    build_stack,
    declared_training,
    problem_of,
)
from fedsim.scenario.model import Data, PluginRef, Scenario
from fedsim.testing.observation import combined, reference
from fedsim.types import Dataset, Observation, RowTruth, Table, Update

_CPU = torch.device("cpu")


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
    """Returns what a server sees of a release from the `members` among `rows`, and the truth.

    Args:
        rows: (N, d + 1) features and target in [-1, 1], no longer than `row_norm`: those of the
            first client, then of the second, as many of each.
        members: (N,) bool: those that take part.
        learner: a registered closed-form learner.
        parameters: of the learner.
        defense: lists defenses as a scenario does.
        num_clients: that release; several take an aggregation defense that combines them.
        intercept: whether the last feature is the constant 1.
        classes: of a target that is -1 or +1, else None.
        row_norm: bound on the L2 norm of a row; default: sqrt(d + 1).
        seed: draws the random matrices and the defenses' noise.

    Raises:
        PluginError: the learner or a defense is not installed.
        FedsimError: they do not fit each other.
        ValueError: several clients' releases are not combined.
    """
    stack = build_stack([reference(member) for member in defense])
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
        private_statistics=(),
    )
    scenario = _scenario(learner, parameters, num_clients)
    return _observe(scenario, stack, table, (rows, table.train_labels), members, defense, seed)


def make_kernel_release(
    images: Tensor,
    labels: Tensor,
    members: Tensor,
    *,
    parameters: Mapping[str, Any] | None = None,
    defense: Sequence[Mapping[str, Any]] = (),
    num_clients: int = 1,
    seed: int = 0,
) -> tuple[Observation, RowTruth]:
    """Returns what a server sees of a kernel regression of images, and the truth.

    Args:
        images: (N, C, H, W) uint8.
        labels: (N,) int64, of as many classes as the largest says.
        members: (N,) bool: those that take part.
        parameters: of learner ntk.
        defense: lists defenses as a scenario does.
        num_clients: that release; without an aggregation defense the release is the first
            client's.
        seed: draws the neurons and the defenses' noise.

    Raises:
        PluginError: a defense is not installed.
        FedsimError: they do not fit each other.
    """
    stack = build_stack([reference(member) for member in defense])
    channels = images.shape[1]
    dataset = Dataset(
        name="example",
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        classes=tuple(f"class {i}" for i in range(int(labels.max()) + 1)),
        private_statistics=(),
    )
    learner = build_learner(PluginRef(name="ntk", parameters=dict(parameters or {})))
    scenario = _scenario("ntk", learner.model_dump(mode="json"), num_clients)
    held = (as_pixels(images), labels)
    return _observe(scenario, stack, dataset, held, members, defense, seed)


def _scenario(learner: str, parameters: Mapping[str, Any] | None, clients: int) -> Scenario:
    return Scenario(
        name="example",
        data=Data(source=PluginRef(name="example"), clients=clients),
        learner=PluginRef(name=learner, parameters=dict(parameters or {})),
        attacks=[],
    )


def _observe(
    scenario: Scenario,
    stack: Stack,
    dataset: Dataset | Table,
    data: tuple[Tensor, Tensor],
    members: Tensor,
    defense: Sequence[Mapping[str, Any]],
    seed: int,
) -> tuple[Observation, RowTruth]:
    """Returns the release of the `members` among the clients' data, which is equally divided."""
    problem = problem_of(scenario, stack, dataset.without_training(), len(members), _CPU)
    refs = [reference(member) for member in defense]
    computation = build_learner(scenario.learner).start(problem)
    before, buffers = computation.initial()
    declared = declared_training(scenario)
    parts = torch.arange(len(members)).chunk(scenario.data.clients)
    if stack.aggregation is None:
        parts = parts[:1]
    updates = []
    for client, indices in enumerate(parts):
        kept = indices[members[indices]]
        stream = rng.generator(seed, "defense", client)
        request = Request(
            batches=[(data[0][kept], data[1][kept])],
            parameters=before,
            buffers=buffers,
            training=declared,
            stream=rng.generator(seed, "learner", client),
            recorded=True,
        )
        released = computation.compute(request, stream).update
        state = stack.init(released, declared, computation.release)
        defended, _ = stack.apply(released, state, stream)
        updates.append(Update(tensors=defended, num_examples=1))
    update = combined(stack, updates, declared, computation.release, seed)
    spec = computation.describe()
    assert spec is not None
    client = -1 if stack.aggregation else 0
    observation = Observation(
        id=observation_id("example", 1, client, "training"),
        update=update.tensors,
        buffers_update={},
        parameters=before,
        buffers=buffers,
        spec=spec,
        training=declared,
        defense=announced(stack, refs, declared, computation.release),
        effect=stack.effect(declared, computation.release),
        vantage=stack.vantage,
        round=1,
        client=client,
        num_clients=len(parts),
        trial=0,
        seed=0,
    )
    order = torch.cat(parts)
    truth = computation.candidates(data[0][order], data[1][order])
    assert truth is not None
    clients = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    return observation, replace(
        truth, rows=truth.rows.clone(), members=members[order].clone(), clients=clients
    )


def example_rows(count: int, columns: int = 4) -> tuple[Tensor, Tensor]:
    """Returns rows (count, columns) float64, and which of them take part, (count,) bool.

    Entries are uniform in [-1, 1] but for a constant feature 1 before the target. Two of three rows
    take part.
    """
    stream = rng.generator(0, "example rows")
    rows = torch.rand(count, columns, generator=stream, dtype=torch.float64) * 2 - 1
    rows[:, -2] = 1
    return rows, torch.arange(count) % 3 > 0
