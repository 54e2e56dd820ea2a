"""The engine of a deployed run: nodes that lie, the server's noise, and Flower's insides."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from nodes_support import LINK, SMALL, TINY, connect, nodes

from fedsim.federation import deployment, wire
from fedsim.federation.deployed import Deployed
from fedsim.federation.network import flower
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.secure_aggregation import plan
from fedsim.scenario import Scenario, expand, resolve
from fedsim.training.server import Census
from fedsim.training.workload import Workload
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
        deployment.Deployment().clients_of(scenario(), tmp_path, LINK, None)


def test_another_version_is_told_before_what_it_may_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, tmp_path, version="999", **{wire.CLIENT: "one"})
    with pytest.raises(FedsimError, match=r"of version 999.*install the same fedsim"):
        deployment.Deployment().clients_of(scenario(), tmp_path, LINK, None)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_kept_census_that_is_silent_about_a_unit_is_damaged(unit: str, tmp_path: Path) -> None:
    """It would pass for data without private statistics, and an ε would be stated."""
    said: dict[str, Any] = {"client": ("sizes",), "example": ()}
    Deployed(Census(held=[5, 6], private_statistics=said), None).save(tmp_path)
    assert Deployed.read(tmp_path).census.private_statistics == said
    path = tmp_path / "census.json"
    kept = json.loads(path.read_text())
    del kept["private_statistics"][unit]
    path.write_text(json.dumps(kept))
    with pytest.raises(FedsimError, match=r"census\.json: damaged"):
        Deployed.read(tmp_path)


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
    found = deployment.Deployment().clients_of(scenario(), tmp_path, LINK, None)
    kept = found.census.private_statistics["client"]
    assert len(kept) <= 20 and all(len(reason) <= 500 for reason in kept)
    assert all(reason.isprintable() for reason in kept)


def test_another_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment.Deployment().check()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.99.0")
    with pytest.raises(FedsimError, match=r"knows Flower 1\.41\.x, and 1\.99\.0 is.*pip install"):
        deployment.Deployment().check()


def test_a_bundle_holds_no_code() -> None:
    """Nodes execute what is installed; were Flower to run the bundle, nothing would happen."""
    with zipfile.ZipFile(BytesIO(flower._bundle())) as bundle:
        text = bundle.read("fedsim_run/__init__.py").decode()
        settings = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert "import" not in text
    declared = set(settings["tool"]["flwr"]["app"]["config"])
    assert declared == {"version", "scenario", "stack", "run", "held"}


@pytest.mark.parametrize("secure", [False, True])
def test_an_answer_may_have_what_is_asked_for(secure: bool) -> None:
    stack = [{"name": "clip", "norm": 1.0}, "secure_aggregation"] if secure else []
    workload = Workload(resolve({**TINY, "defenses": {"one": stack}}), "one")
    parameters, _ = workload.initial()
    model = sum(tensor.nbytes for tensor in parameters.values())
    layout = plan.layout(workload, TINY["training"]["rounds"]) if secure else None
    asked = len(layout.sums) * layout.length * 4 if layout else model
    assert asked < deployment._most_bytes(workload) < 2 * asked + 2 * 2**20
