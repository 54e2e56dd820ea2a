"""Secure sums of nodes: with whom, on whose terms, and what a server that lies gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message, RecordDict
from nodes_support import nodes
from test_node_app import ask, resolved, settings

from fedsim.federation import wire
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.federation.secure_aggregation import messages
from fedsim.federation.secure_aggregation.secrets import Identity
from fedsim.scenario import Scenario
from fedsim.types import FedsimError

HELD = "[480, 479, 479]"
CLIP = {"name": "clip", "norm": 1.0}
SECURE = [CLIP, {"name": "secure_aggregation"}]
ALL = [CLIP, {"name": "secure_aggregation", "threshold": 1.0}]
STACKS = {"none": [CLIP], "secure": SECURE, "all": ALL}


def secure(**changes: Any) -> Scenario:
    return resolved(defenses=STACKS, **changes)


def identities(count: int = 3) -> dict[int, Identity]:
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    peers = {client: key.public_key().public_bytes_raw() for client, key in enumerate(keys)}
    return {client: Identity(key=key, peers=peers) for client, key in enumerate(keys)}


def answer(
    app: NodeApp, scenario: Scenario, stage: str, table: Mapping[int, bytes], stack: str = "secure"
) -> Message:
    content = messages.order(messages.table(1, table))
    return ask(app, f"train.{stage}", settings(scenario, stack, held=HELD), content)


def test_no_two_keys_of_a_node_are_one(tmp_path: Path) -> None:
    app, *_ = nodes(tmp_path, identities=identities())
    first, second = (
        messages.read_table(wire.config_of(answer(app, secure(), "keys", {}).content))
        for _ in range(2)
    )
    assert first != second


def test_nodes_that_were_shown_different_scenarios_are_in_no_sum(tmp_path: Path) -> None:
    """The server tells 1 and 2 of a learning rate of nothing, so that the sum were 0's update."""
    apps = nodes(tmp_path, identities=identities())
    local = {"steps": 1, "batch_size": 4}
    told = [
        secure(training={"rounds": 2, "local": {**local, "lr": lr}}) for lr in (0.1, 1e-12, 1e-12)
    ]
    keys: dict[int, bytes] = {}
    for app, scenario in zip(apps, told, strict=True):
        keys |= messages.read_table(wire.config_of(answer(app, scenario, "keys", {}).content))
    for app, scenario in zip(apps, told, strict=True):
        with pytest.raises(FedsimError, match="are not signed by it"):
            answer(app, scenario, "shares", keys)


@pytest.mark.parametrize(
    ("policy", "stack", "changes", "said"),
    [
        ({"minimum_cohort": 2}, "secure", {}, None),
        ({"minimum_cohort": 3}, "secure", {}, r"opens with 2 of the 3 .*\(minimum_cohort\)"),
        ({"minimum_cohort": 3}, "all", {}, None),
        ({"minimum_cohort": 4}, "all", {}, r"opens with 3 of the 3 .*\(minimum_cohort\)"),
        ({"minimum_cohort": 3}, "none", {}, r"releases none as it is \(minimum_cohort\)"),
        (
            {"minimum_cohort": 3},
            "all",
            {"federation": {"participation": 0.67}},
            r"opens with 2 of the 2 .*\(minimum_cohort\)",
        ),
        ({"stacks": [SECURE]}, "secure", {}, None),
        (
            {"stacks": [[CLIP, {"name": "secure_aggregation", "threshold": 0.9}]]},
            "secure",
            {},
            r"does not allow this stack",
        ),
        (
            {"stacks": [[CLIP, {"name": "secure_aggregation", "noise_multiplier": 1.0}]]},
            "secure",
            {},
            r"does not allow this stack",
        ),
    ],
)
def test_a_policy_holds_of_sums(
    policy: dict[str, Any], stack: str, changes: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (app, *_) = nodes(tmp_path, policy=Policy.model_validate(policy), identities=identities())
    if said is None:
        assert answer(app, secure(**changes), "keys", {}, stack).has_content()
        return
    for kind in ("train", "train.probe", "train.keys", "train.masked", "train.unmask"):
        with pytest.raises(FedsimError, match=said):
            config = settings(secure(**changes), stack, held=HELD)
            ask(app, kind, config, RecordDict())
