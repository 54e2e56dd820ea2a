"""A federation of nodes in this process: all of the network but Flower's own programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.federation.local import LocalGrid, identity
from fedsim.federation.network import flower, link
from fedsim.federation.network.link import SCENARIO, Link
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.federation.secure_aggregation.secrets import Identity

LINK = Link(superlink="127.0.0.1:9")

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {"source": {"name": "digits", "size": 8}, "clients": 3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 2, "local": {"steps": 1, "batch_size": 4, "lr": 0.1}},
    "defenses": {
        "none": [],
        "noise": [{"name": "clip", "norm": 1.0}, {"name": "gaussian_noise", "multiplier": 1.0}],
        "aggregate": ["aggregate"],
    },
    "attacks": [{"name": "label_inference"}],
    "observe": {"rounds": ["last"], "clients": [0], "batch_sizes": [1], "trials": 2},
}

SMALL = {**TINY, "defenses": {"noise": TINY["defenses"]["noise"]}}


def nodes(
    home: Path,
    count: int = 3,
    *,
    data: str = SCENARIO,
    policy: Policy | None = None,
    shared_seed: bool = False,
    identities: Mapping[int, Identity] | None = None,
) -> list[NodeApp]:
    """As many nodes, by client, with folders below `home`."""
    return [
        NodeApp(
            client,
            data,
            home / f"node-{client}",
            policy or Policy(),
            shared_seed=shared_seed,
            identity=identities[client] if identities else None,
        )
        for client in range(count)
    ]


def connect(monkeypatch: pytest.MonkeyPatch, apps: Sequence[NodeApp]) -> None:
    """Let runs over a network reach these nodes, and nothing else."""

    @contextmanager
    def server_app(
        _: Link, config: Mapping[str, str], patience: float, most_bytes: int = 0
    ) -> Iterator[tuple[Grid, Context]]:
        def answer(message: Message, context: Context) -> Message:
            context.run_config = dict(config)
            return apps[int(context.node_config["partition-id"])](message, context)

        server = Context(1, 1, {}, RecordDict(), {})
        with identity():
            yield LocalGrid(answer, len(apps), patience), server  # type: ignore[arg-type]

    monkeypatch.setattr(flower, "server_app", server_app)
    monkeypatch.setattr(link, "check", lambda *_: None)
