"""EVALUATION rule 14: an attack knows the declared defense, and simulates what it can of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_scenario

from fedsim.models.base import normalize
from fedsim.recording.files import load_observation, save_observation
from fedsim.scenario.resolve import resolve
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.training.workload import Workload
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    Distance,
    Matching,
    cosine_distance,
    squared_distance,
)

STACKS: dict[str, Any] = {
    "none": [],
    "local": [{"name": "local_aggregation", "steps": 3, "batches": "same"}],
    "pruned": [{"name": "clip", "norm": 0.5}, {"name": "gradient_pruning", "ratio": 0.7}],
    "sum": ["aggregate"],
}

over_distances = pytest.mark.parametrize("distance", [cosine_distance, squared_distance])


@pytest.mark.parametrize("stack", STACKS)
def test_the_observation_declares_the_whole_stack(stack: str, tmp_path: Path) -> None:
    local = {"batch_size": 2, "lr": 0.25}
    scenario = resolve(tiny_scenario(data__clients=3, training__local=local, defenses=STACKS))
    workload = Workload(scenario, stack)
    parameters, buffers = workload.initial()
    update = workload.client_update(0, 1, parameters, buffers, {}).update
    client = -1 if stack == "sum" else 0
    made = workload.observation(1, client, update, parameters, buffers)
    for seen in (made, load_observation(save_observation(made, tmp_path))):
        declared = [dict(member) for member in seen.defense]
        given = [{"name": m} if isinstance(m, str) else m for m in STACKS[stack]]
        assert [member["name"] for member in declared] == [member["name"] for member in given]
        for found, written in zip(declared, given, strict=True):
            assert found.items() >= written.items(), "every parameter, also those left out"
        assert seen.vantage == ("aggregate" if stack == "sum" else "server")
        steps, algorithm = (3, "fedavg") if stack == "local" else (1, "fedsgd")
        assert (seen.training.steps, seen.training.algorithm) == (steps, algorithm)
        assert seen.training.lr == 0.25


@pytest.mark.parametrize("batches", ["same", "different"])
@over_distances
def test_local_steps_are_simulated_and_not_ignored(batches: str, distance: Distance) -> None:
    count = 2 if batches == "same" else 6
    observation, truth = make_observation(
        *example_batch(count),
        training=LocalTraining(algorithm="fedsgd", steps=1, batch_size=2, lr=0.3, momentum=0.5),
        defense=[{"name": "local_aggregation", "steps": 3, "batches": batches}],
    )
    assert observation.training.num_images == count
    ignorant = LocalTraining(
        algorithm="fedsgd", steps=1, batch_size=count, lr=0.3, mode=observation.training.mode
    )
    one_gradient = replace(
        observation,
        training=ignorant,
        update={name: -tensor / 0.3 for name, tensor in observation.update.items()},
    )
    assert abs(at_truth(observation, truth, distance)) < 1e-6
    assert at_truth(one_gradient, truth, distance) > 1e-3


@over_distances
def test_a_mean_of_clients_is_simulated_and_not_taken_for_one_client(distance: Distance) -> None:
    observation, truth = make_observation(
        *example_batch(8),
        training=LocalTraining(algorithm="fedavg", steps=2, batch_size=2, lr=0.3),
        defense=[{"name": "aggregate"}],
        num_clients=2,
    )
    longer = replace(observation.training, steps=4)
    one_client = replace(observation, num_clients=1, training=longer)
    assert abs(at_truth(observation, truth, distance)) < 1e-6
    assert at_truth(one_client, truth, distance) > 1e-3


def at_truth(observation: Observation, truth: GroundTruth, distance: Distance) -> float:
    """The matching objective at the true images and labels."""
    matching = Matching(observation)
    images = normalize(truth.images, observation.model)
    candidate = Candidate(images, truth.labels)
    return float(matching.differentiate(candidate, distance)[0])
