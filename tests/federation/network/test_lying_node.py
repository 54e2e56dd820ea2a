"""What a node that keeps to no rule gets of a run, and others of what a server makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from nodes_support import LINK, SMALL, connect, nodes

from fedsim.federation import deployment, wire
from fedsim.federation.deployed import Deployed
from fedsim.federation.network.node_app import NodeApp
from fedsim.scenario import Scenario, expand
from fedsim.training.server import Census
from fedsim.types import FedsimError


def scenario() -> Scenario:
    (variant,) = expand({**SMALL, "federation": {"engine": "deployment"}})
    return variant.scenario


def lie(monkeypatch: pytest.MonkeyPatch, home: Path, **said: Any) -> None:
    """Let node 1 answer a census with what is `said`."""
    apps = nodes(home)

    class Liar(NodeApp):
        def __call__(self, message: Message, context: Context) -> Message:
            told = {
                "version": wire.VERSION,
                wire.CLIENT: 1,
                "held": 479,
                "statistics": "{}",
                **said,
            }
            return Message(RecordDict({wire.CONFIG: ConfigRecord(told)}), reply_to=message)

    apps[1].__class__ = Liar
    connect(monkeypatch, apps)


@pytest.mark.parametrize(
    "said",
    [
        {"held": -1},
        {"held": 2**60},
        {"held": "9"},
        {"statistics": "["},
        {"statistics": "[" * 100_000},
        {"statistics": '{"client": 5}'},
        {"statistics": "[]"},
    ],
)
def test_a_census_that_is_none_ends_the_run(
    said: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, tmp_path, **said)
    with pytest.raises(FedsimError, match="answers a census with something else"):
        deployment.take_census(scenario(), LINK)


def test_no_two_stacks_have_the_noise_of_a_server_in_common() -> None:
    defenses = {"one": SMALL["defenses"]["noise"], "other": SMALL["defenses"]["noise"]}
    (variant,) = expand({**SMALL, "defenses": defenses})
    census = Census(held=[480, 479, 479], private_statistics={"client": (), "example": ()})
    for secret, count in ((b"s" * 32, 2), (None, 1)):
        servers = Deployed(census, secret).servers(variant.scenario)
        assert len({server.noise_seed for server in servers.values()}) == count


def test_reasons_of_a_node_are_cut_and_made_printable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["\x1b[2J" + "x" * 10_000] * 2 + [str(number) for number in range(100)]
    lie(monkeypatch, tmp_path, statistics=json.dumps({"client": reasons}))
    kept = deployment.take_census(scenario(), LINK).private_statistics["client"]
    assert len(kept) <= 20 and all(len(reason) <= 500 for reason in kept)
    assert all(reason.isprintable() for reason in kept)
