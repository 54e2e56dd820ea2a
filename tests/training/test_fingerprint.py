"""Whatever changes what a client releases changes the fingerprint that its noise is drawn for."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedsim.contracts.stack import Stack
from fedsim.federation.checkpoint import fingerprint
from fedsim.federation.secure_aggregation import plan
from fedsim.privacy.ledger import Entry
from fedsim.rng import digest
from fedsim.scenario import Scenario
from fedsim.scenario.resolve import resolve
from fedsim.training import spending
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, LocalTraining

CLIP = {"name": "clip", "norm": 1.0}
RICH: dict[str, Any] = {
    "name": "rich",
    "seed": 3,
    "data": {
        "source": {"name": "digits", "size": 8},
        "clients": 3,
        "partition": {"name": "dirichlet", "alpha": 50.0},
    },
    "model": {"name": "mlp", "hidden": [8], "head": {"width": 16}},
    "training": {"rounds": 2, "local": {"batch_size": 16, "lr": 0.1}, "projection_radius": 5.0},
    "federation": {"strategy_parameters": {"fraction_train": 1.0}},
    "defenses": {
        "private": [{"name": "dp_sgd", "norm": 1.0, "epsilon": 4.0}],
        "sum": [CLIP, {"name": "secure_aggregation", "noise_multiplier": 1.0, "threshold": 0.8}],
    },
    "attacks": [{"name": "inverting_gradients"}],
    "observe": {"rounds": [2], "clients": [0], "batch_sizes": [2], "trials": 2},
    "knowledge": {"labels": "known"},
    "audit": {"canaries": 300},
    "scoring": {"confidence": 0.9},
}
ANOTHER: dict[str, list[Any]] = {
    "algorithm": ["fedavg", "fedsgd"],
    "mode": ["eval", "train"],
    "batches": ["same"],
    "sampling": ["poisson", "balls_in_bins"],
    "engine": ["simulation"],
    "strategy": ["FedAvgM"],
    "probes": ["outside"],
    "weights": ["public"],
    "vantages": [["eavesdropper"], ["server", "client"]],
    "clients": [2, 4, [1], "all"],
    "batch_sizes": [[1, 2], None],
    "rounds": [3, [1], ["last", 1]],
    "projection_radius": [None, 1e-3],
    "activation": ["tanh", "relu", "sigmoid"],
    "labels": ["none"],
    "method": ["one_run"],
    "threads": [2],
    "delta": [1e-6],
    "momentum": [0.5],
    "steps": [2],
    "hidden": [[9], [8, 8]],
    "participation": [0.5],
    "threshold": [0.9],
}
"""Other values of a key that are worth a try; of every other key they follow from its type."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the place of all that is no mapping and, of plugins, no list."""
    inner = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        inner = enumerate(value)  # type: ignore[assignment]
    if not inner:
        yield path
    for key, item in inner:
        yield from leaves(item, (*path, key))


def others(key: Any, value: Any) -> list[Any]:
    """Other values of a leaf."""
    if key in ANOTHER:
        return [other for other in ANOTHER[key] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value / 2]
    return [f"{value}x"] if isinstance(value, str) else [0.5, 1]


@cache
def data_of(source: str) -> Dataset:
    """Of scenarios with the same source: few, so that they are parted fast."""
    data = load_dataset(resolve({**RICH, "data": {"source": json.loads(source)}}))
    assert isinstance(data, Dataset)
    few = data.train_images[:240], data.train_labels[:240]
    return replace(data, train_images=few[0], train_labels=few[1])


def released(scenario: Scenario, stack: str) -> str:
    """All that client 0 releases, whatever its noise is keyed by: bytes, rounds, probes, terms."""
    ref = scenario.data.source
    workload = Workload(scenario, stack, data_of(json.dumps({"name": ref.name, **ref.parameters})))
    parameters, buffers = workload.initial()
    client, parts = workload.client(0), []
    schedule, last = workload.schedule, scenario.training.rounds
    probes = [probe for round in range(1, last + 1) for probe in schedule.round(round).probes]
    asked = [
        (r, 0 in schedule.round(r).participants, 0 in schedule.round(r).observed)
        for r in (1, 2, last)
    ]
    for round, probe in [(1, None), (last, None), *((last, probe) for probe in probes[:1])]:
        result = client.update(workload, round, parameters, buffers, {}, probe=probe)
        parts += [result.update.tensors, result.update.buffers if probe else {}]
        if workload.protocol:
            stream = client.sum_stream(round, probe, parameters, buffers)
            terms = plan.terms(workload, round)
            layout = plan.layout(workload, round)
            vector = layout.vector([result.update] * len(layout.sums), lambda _: stream)  # noqa: B023
            parts.append({"vector": torch.from_numpy(vector.view("int32"))})
            asked.append((terms.participants, terms.threshold, terms.quorum))  # type: ignore[arg-type]
    return f"{digest(*parts)} {asked} {probes} {workload.reports_loss}"


def accounted(stack: Stack, declared: LocalTraining, entry: Entry) -> SimpleNamespace:
    """A number below 1 for all that an ε is computed from, but for the stack itself."""
    text = repr((declared, entry)).encode()
    share = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") / 2**32
    return SimpleNamespace(epsilon=share, reason=None)


@pytest.mark.slow
def test_what_changes_a_release_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario that a server varies under the name of a run has another fingerprint, or the same
    release: else one noise serves two values."""
    # In place of ε and of the search for its noise: as much functions of all that is accounted.
    monkeypatch.setattr(spending, "claim", accounted)
    monkeypatch.setattr(spending, "least_noise", lambda epsilon_of, most: epsilon_of(1.0) / most)
    base = resolve(RICH)
    plain = base.model_dump(mode="json")
    stacks = list(base.defenses)
    before = {stack: (released(base, stack), fingerprint(base, stack)) for stack in stacks}
    changed: dict[str, set[str]] = {stack: set() for stack in stacks}
    tried = 0
    for path in leaves(plain):
        *to, key = path
        for value in others(key, plain_at(plain, path)):
            varied = copy.deepcopy(plain)
            plain_at(varied, tuple(to))[key] = value
            for stack in {path[1]} & set(stacks) if path[0] == "defenses" else stacks:
                try:
                    scenario = Scenario.model_validate_json(json.dumps(varied))
                    resolve(scenario.model_copy(update={"attacks": []}))
                    after = released(scenario, stack), fingerprint(scenario, stack)
                except (ValidationError, FedsimError, NotImplementedError):
                    continue  # refused, as by a node
                tried += 1
                if after[0] != before[stack][0]:
                    changed[stack].add(".".join(map(str, path)))
                    assert after[1] != before[stack][1], (stack, path, value)
    # It is seen to look: these, at least, decide what is released.
    common = {"seed", "data.partition.alpha", "training.local.batch_size"}
    assert all(common <= found for found in changed.values())
    spent = {"privacy.delta", "privacy.probes", "observe.trials", "training.rounds"}
    assert spent | {"defenses.private.0.parameters.epsilon"} <= changed["private"]
    assert "defenses.sum.1.parameters.threshold" in changed["sum"]
    assert not {"name", "description", "attack_seed", "scoring.confidence"} & changed["private"]
    assert tried > 100


def plain_at(value: Any, path: tuple[Any, ...]) -> Any:
    """What stands at `path`."""
    for part in path:
        value = value[part]
    return value
