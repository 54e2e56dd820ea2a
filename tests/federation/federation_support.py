"""Tiny federations for the tests, and a way to make chosen clients misbehave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message, RecordDict
from tiny import change

from fedsim.federation import client_app, federate, local, server_app
from fedsim.federation.checkpoint import Checkpoints
from fedsim.federation.client_app import FederationJob
from fedsim.federation.records import RoundRecord
from fedsim.federation.secure_aggregation.secrets import Identity
from fedsim.recording.files import load_observation
from fedsim.scenario import Scenario
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, Observation

_NOISE = {"strategy": "FedAvg", "noise_multiplier": 0.001, "num_sampled_clients": 4}
_LOUD = {**_NOISE, "noise_multiplier": 0.1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "FedAvgM": {"server_momentum": 0.9, "server_learning_rate": 0.5},
    "QFedAvg": {"client_learning_rate": 0.1},
    "DifferentialPrivacyServerSideFixedClipping": {
        **_LOUD,
        "strategy": {"name": "FedAvgM", "server_momentum": 0.9},
        "clipping_norm": 1.0,
    },
    "DifferentialPrivacyClientSideFixedClipping": {**_NOISE, "clipping_norm": 100.0},
    "DifferentialPrivacyClientSideAdaptiveClipping": {**_NOISE, "initial_clipping_norm": 100.0},
    "DifferentialPrivacyServerSideAdaptiveClipping": {
        **_LOUD,
        "strategy": {"name": "FedAdam", "eta": 0.01},
    },
}
"""Parameters of the strategies that have any to be given."""


def plugin(name: str, **parameters: Any) -> dict[str, Any]:
    """As a scenario has it once it is resolved."""
    return {"name": name, "parameters": parameters}


CLIP = plugin("clip", norm=1.0)
TOPK = {"topk": [plugin("top_k", ratio=0.1)]}
BATCH_NORM: dict[str, Any] = {
    "data__source": plugin("digits", size=9),
    "model": plugin("convnet", width=2, norm="batch"),
}

Fault = Callable[[int, Message, Callable[[], Message]], Message]
"""(client, message received, what the honest client would answer) -> the answer."""


def scenario(**changes: Any) -> Scenario:
    """Four clients, 8x8 digits, a small MLP. Dotted keys change one entry: `training.rounds=5`."""
    plain: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "data": {"source": {"name": "digits", "parameters": {"size": 8}}, "clients": 4},
        "model": {"name": "mlp", "parameters": {"hidden": [8]}},
        "training": {"rounds": 3, "local": {"steps": 1, "batch_size": 4, "lr": 0.1}},
        "federation": {},
        "defenses": {"none": []},
        "attacks": [],
        "observe": {"rounds": [1, "last"], "clients": [0]},
    }
    return Scenario.model_validate(change(plain, changes))


def with_strategy(name: str, parameters: dict[str, Any], **changes: Any) -> Scenario:
    """`scenario`, of a strategy with these parameters."""
    return scenario(federation={"strategy": name, "strategy_parameters": parameters}, **changes)


@cache
def _dataset(source: str) -> Dataset:
    return load_dataset(scenario(data=json.loads(source)))


def workload(wanted: Scenario, stack: str = "none") -> Workload:
    """The stack's workload; the data is loaded once."""
    return Workload(wanted, stack, _dataset(wanted.data.model_dump_json()))


def train(
    wanted: Scenario, out: Path, stack: str = "none", *, resume: bool = False
) -> list[RoundRecord]:
    """Train on the local engine; returns the rounds."""
    records: list[RoundRecord] = []
    federate(
        wanted, stack, out, resume=resume, on_round=records.append, server=workload(wanted, stack)
    )
    return records


def train_with_fault(
    wanted: Scenario,
    out: Path,
    fault: Fault,
    stack: str = "none",
    grid: type[local.LocalGrid] = local.LocalGrid,
) -> list[RoundRecord]:
    """Train on the local grid, or one like it, with clients whose answers go through `fault`."""
    shared = workload(wanted, stack)
    job = FederationJob(scenario=wanted.model_dump_json(), stack=stack, out=str(out))
    honest = client_app.build(job, shared)

    def faulty(message: Message, context: Context) -> Message:
        if not message.metadata.message_type.startswith("train"):
            return honest(message, context)
        client = int(context.node_config["partition-id"])
        return fault(client, message, lambda: honest(message, context))

    records: list[RoundRecord] = []
    server = server_app.build(shared, out, records.append)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with local.identity():
        # It is called like an app, and that is all.
        server(grid(faulty, wanted.data.clients, wanted.federation.timeout), context)  # type: ignore[arg-type]
    return records


def final_model(out: Path, wanted: Scenario, stack: str = "none") -> dict[str, torch.Tensor]:
    saved = Checkpoints(out, wanted, stack).load()
    assert saved is not None and saved.round == wanted.training.rounds
    return {**saved.parameters, **saved.buffers}


def observation(out: Path, id: str) -> Observation:
    return load_observation(out / "observations" / f"{id}.json")


def contents(out: Path) -> dict[str, str]:
    """Every file below `out` and its digest; checkpoints' tensors by value."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def results(records: list[RoundRecord]) -> list[dict[str, Any]]:
    """The records without their wall time."""
    return [{**vars(record), "seconds": None} for record in records]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def identities(count: int) -> dict[int, Identity]:
    """Of clients that know each other's keys for secure sums."""
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    peers = {client: key.public_key().public_bytes_raw() for client, key in enumerate(keys)}
    return {client: Identity(key=key, peers=peers) for client, key in enumerate(keys)}
