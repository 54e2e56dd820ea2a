"""Secure sums of nodes: with whom, on whose terms, and what a server that lies gets of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federation_support import identities
from flwr.app import Message, RecordDict
from nodes_support import LINK, TINY, connect, nodes
from test_node_app import ask, resolved, settings

from fedsim import pipeline
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.federation.secure_aggregation import messages
from fedsim.scenario import Scenario
from fedsim.types import FedsimError

HELD = "[480, 479, 479]"
CLIP = {"name": "clip", "norm": 1.0}
SECURE = [CLIP, {"name": "secure_aggregation"}]
ALL = [CLIP, {"name": "secure_aggregation", "threshold": 1.0}]
STACKS = {"none": [CLIP], "secure": SECURE, "all": ALL}


def secure(**changes: Any) -> Scenario:
    return resolved(defenses=STACKS, **changes)


def answer(
    app: NodeApp, scenario: Scenario, stage: str, table: Mapping[int, bytes], stack: str = "secure"
) -> Message:
    content = messages.table(1, table)
    return ask(app, f"train.{stage}", settings(scenario, stack, held=HELD), content)


def test_no_two_keys_of_a_node_are_one(tmp_path: Path) -> None:
    app, *_ = nodes(tmp_path, identities=identities(3))
    first, second = (
        messages.read_table(answer(app, secure(), "keys", {}).content) for _ in range(2)
    )
    assert first != second


def test_nodes_that_were_shown_different_scenarios_are_in_no_sum(tmp_path: Path) -> None:
    """The server tells 1 and 2 of a learning rate of nothing, so that the sum were 0's update."""
    apps = nodes(tmp_path, identities=identities(3))
    local = {"steps": 1, "batch_size": 4}
    told = [
        secure(training={"rounds": 2, "local": {**local, "lr": lr}}) for lr in (0.1, 1e-12, 1e-12)
    ]
    keys: dict[int, bytes] = {}
    for app, scenario in zip(apps, told, strict=True):
        keys |= messages.read_table(answer(app, scenario, "keys", {}).content)
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
    (app, *_) = nodes(tmp_path, policy=Policy.model_validate(policy), identities=identities(3))
    if said is None:
        assert answer(app, secure(**changes), "keys", {}, stack).has_content()
        return
    for kind in ("train", "train.probe", "train.keys", "train.masked", "train.unmask"):
        with pytest.raises(FedsimError, match=said):
            config = settings(secure(**changes), stack, held=HELD)
            ask(app, kind, config, RecordDict())


RUN = {**TINY, "defenses": {"secure": SECURE}, "federation": {"engine": "deployment"}}


@pytest.mark.usefixtures("attacks_here")
def test_nodes_with_secrets_of_their_own_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two runs have the same masked vector, and the truth of it stays with the node."""
    seen = []
    for run in ("one", "two"):
        out, homes = tmp_path / run / "out", tmp_path / run / "homes"
        connect(monkeypatch, nodes(homes, identities=identities(3)))
        pipeline.run(RUN, out=out, workers=1, link=LINK)
        rounds = (out / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(row)["aggregated"] for row in rounds] == [3, 3]
        masked = out / "observations" / "secure" / "round-0002"
        seen.append((masked / "client-0000-b1-t0.safetensors").read_bytes())
        assert not (out / "truth").exists()
        pipeline.collect(out, homes=sorted(homes.iterdir()), workers=1)
        rows = (out / "results.jsonl").read_text().splitlines()
        assert {json.loads(row)["status"] for row in rows} == {"ok"}
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "knows no keys of its peers"),
        ("swapped", "client 0 has another key there than --signing-key"),
        ("few", "no key of client 2, who is to take part"),
        ("cohort", "minimum_cohort"),
    ],
)
def test_a_node_that_cannot_know_its_peers_takes_no_part(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = None if change == "none" else identities(3)
    if known and change == "swapped":
        known[0] = replace(known[0], key=known[1].key)
    if known and change == "few":
        known[0] = replace(known[0], peers={n: known[0].peers[n] for n in (0, 1)})
    policy = Policy(minimum_cohort=4) if change == "cohort" else None
    apps = nodes(tmp_path / "homes", identities=known, policy=policy)
    connect(monkeypatch, apps)
    with pytest.raises(FedsimError, match=message):
        pipeline.run(RUN, out=tmp_path / "out", workers=1, link=LINK)
    for app in apps:
        if change == "swapped" and app is apps[0]:
            with pytest.raises(FedsimError, match="check --client"):
                app.refuse_other_identity()
        else:
            app.refuse_other_identity()
