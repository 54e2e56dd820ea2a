"""Runs over nodes with own folders: same bytes, truth that stays away, nodes that lie."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tomllib
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import contents
from flwr.app import ConfigRecord, Context, Message, RecordDict
from nodes_support import LINK, SMALL, TINY, connect, nodes

from fedsim import pipeline
from fedsim.federation import wire
from fedsim.federation.deployed import Deployed, run_name
from fedsim.federation.deployment import Deployment, _most_bytes
from fedsim.federation.network import flower
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.federation.secure_aggregation import plan
from fedsim.recording.files import GLOBAL, load_observation, write_bytes, write_tensors
from fedsim.recording.truth import load_truth
from fedsim.scenario import Scenario, expand, resolve
from fedsim.training.server import Census
from fedsim.training.workload import Workload
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")

SHARED = replace(LINK, shared_seed=True)


def rows(folder: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    for row in found:
        for key in ("cost", "seconds"):
            row.pop(key, None)
    return found


def deployed(plain: dict[str, Any] = TINY) -> dict[str, Any]:
    return {**plain, "federation": {"engine": "deployment"}}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    pipeline.run(TINY, out=tmp_path / "local", workers=1)
    return tmp_path / "local"


def test_with_a_shared_seed_all_bytes_are_those_of_the_local_engine(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    connect(monkeypatch, nodes(tmp_path / "homes", shared_seed=True))
    pipeline.run(deployed(), out=out, workers=1, link=SHARED)

    for part in ("checkpoints", "observations"):
        assert contents(out / part) == contents(local / part)
    assert not (out / "truth").exists()
    unscored = rows(out)
    assert [row["status"] for row in unscored] == ["unscored"] * len(rows(local))
    assert all(row["metrics"]["psnr"] is None and row["reason"] for row in unscored)
    page = (out / "report.html").read_text()
    assert "fedsim up scenario.yaml --shared-seed" in page and "figures will differ" not in page

    pipeline.collect(out, homes=sorted((tmp_path / "homes").iterdir()), workers=1)
    assert rows(out) == rows(local)
    assert rows(out, "rounds.jsonl") == rows(local, "rounds.jsonl")
    assert contents(out / "truth") == contents(local / "truth")
    assert {row["privacy"]["noise_key"] for row in rows(out)} == {"scenario"}


def kept_truth(home: Path, run: str, seen: str, client: str) -> None:
    place = home / "runs" / run / "truth" / "none" / "round-0001" / seen
    truth = {"images": torch.zeros(1, 1, 2, 2), "labels": torch.zeros(1, dtype=torch.int64)}
    write_tensors(place / f"client-{client}.safetensors", truth)


@pytest.mark.parametrize(
    ("seen", "client", "folder"),
    [
        ("client-0000-training", "0000", "node-1"),  # beside node-0's own
        ("client-0000-training", "0001", "node-1"),  # in the place of 0's
        ("wire-0000-training", "0001", "node-1"),
        ("aggregate-training", "0000", "node-1"),
        ("aggregate-training", "0001x", "node-1"),
        ("client-0000-training", "0000", "nodes/node-1"),  # and node-0's is not there
    ],
)
def test_truth_of_a_client_is_taken_from_its_own_folder(
    seen: str, client: str, folder: str, tmp_path: Path
) -> None:
    out = tmp_path
    run = run_name(out)
    kept_truth(out / folder, run, seen, client)
    homes = [] if "/" in folder else [out / "node-0", out / folder]
    if homes:
        kept_truth(out / "node-0", run, "client-0000-training", "0000")
        kept_truth(out / folder, run, "client-0001-training", "0001")
    with pytest.raises(FedsimError, match="client"):
        Deployment().join(out, homes)
    assert not (out / "truth").exists()


def test_a_node_adds_nothing_to_what_the_server_recorded(tmp_path: Path) -> None:
    run = run_name(tmp_path)
    home = tmp_path / "nodes" / "node-1"
    kept_truth(home, run, "participant-0001-training", "0001")
    names = ["client-0000-training.json", "participant-0000-training.json"]
    own = ["participant-0001-training.json", GLOBAL]
    for name in (*names, *own):
        write_bytes(home / "runs" / run / "observations" / "none" / "round-0001" / name, b"x")
    assert Deployment().join(tmp_path, []) == 1
    copied = (tmp_path / "observations").rglob("*.*")
    assert {path.name for path in copied} == set(own)
    truth = next((tmp_path / "truth").rglob("*.safetensors"))
    assert truth.stat().st_mode & 0o077 == 0
    assert Deployment().join(tmp_path, []) == 1, "the same once more"
    truth.write_bytes(b"another's")
    with pytest.raises(FedsimError, match="collected before"):
        Deployment().join(tmp_path, [])


@pytest.mark.parametrize("depth", range(7))
def test_nothing_is_collected_by_a_link(depth: int, tmp_path: Path) -> None:
    """Whoever fills a node's folder must not choose what else the collector reads."""
    out, home = tmp_path / "out", tmp_path / "home"
    kept_truth(home, run_name(out), "client-0001-training", "0001")
    truth = next(home.rglob("*.safetensors"))
    part = [truth, *truth.parents][depth]
    assert part.is_relative_to(home / "runs")
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedsimError, match=f"{part.name}.*link"):
        Deployment().join(out, [home])
    assert not (out / "truth").exists()


def test_what_is_collected_are_regular_files(tmp_path: Path) -> None:
    out, home = tmp_path / "out", tmp_path / "home"
    kept_truth(home, run := run_name(out), "client-0001-training", "0001")
    truth = next(home.rglob("*.safetensors"))
    seen = home / "runs" / run / "observations" / "none" / "participant-0001-training.json"
    seen.parent.mkdir(parents=True)
    os.mkfifo(seen)
    with pytest.raises(FedsimError, match="a named pipe"):
        Deployment().join(out, [home])
    for collected in (out / "truth").rglob("*.safetensors"):
        collected.unlink()
    truth.unlink()
    os.mkfifo(truth)
    with pytest.raises(FedsimError, match="a named pipe"):
        Deployment().join(out, [home])


def test_an_unscored_run_is_no_invalid_one_and_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedsim.cli.shared import leaderboard, outcome
    from fedsim.report import leaderboard_rows, load_runs, unfinished

    homes, out = tmp_path / "homes", tmp_path / "out"
    connect(monkeypatch, nodes(homes))
    pipeline.run(deployed(SMALL), out=out, workers=1, link=LINK, quiet=False)
    assert "still with the nodes" in capsys.readouterr().err
    assert leaderboard_rows([out]) == []
    (line,) = unfinished(load_runs([out]))
    assert "UNSCORED" in line and f"fedsim collect {out} --from HOME" in line
    page = (out / "report.html").read_text()
    assert "INVALID" not in page and f"fedsim collect {out}" in page
    assert "INVALID" not in outcome(load_runs([out]))
    assert leaderboard(load_runs([out]), "table") == "UNSCORED: no attack is scored yet\n"
    written = json.loads(leaderboard(load_runs([out]), "json"))
    assert not written["valid"] and "is still with their nodes" in written["invalid_reasons"][0]

    pipeline.collect(out, homes=sorted(homes.iterdir()), workers=1)
    page = (out / "report.html").read_text()
    assert "UNSCORED" not in page and "All attacks in figures" in page


@pytest.mark.parametrize("shared", [True, False])
def test_only_with_a_shared_seed_can_its_knower_take_the_noise_off(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, homes = tmp_path / "out", tmp_path / "homes"
    connect(monkeypatch, nodes(homes, shared_seed=shared))
    pipeline.run(deployed(SMALL), out=out, workers=1, link=SHARED if shared else LINK)
    pipeline.collect(out, homes=sorted(homes.iterdir()), workers=1)
    assert {row["privacy"]["noise_key"] for row in rows(out)} == {"scenario" if shared else "node"}

    # The attacker has all that server and wire hold, which is all but the nodes' secrets.
    (variant,) = expand(TINY)
    seen = load_observation(out / "observations/noise/round-0002/client-0000-b1-t0.json")
    workloads = {name: Workload(variant.scenario, name) for name in ("none", "noise")}
    probe = workloads["none"].plan(2).probes[0]
    replayed = {
        name: each.client_update(0, 2, seen.parameters, seen.buffers, {}, probe=probe)
        for name, each in workloads.items()
    }
    noise = _flat(replayed["noise"].update.tensors) - _flat(
        _clipped(replayed["none"].update.tensors)
    )
    wanted = _flat(_gradient(load_truth(out, seen.id), seen))
    distance = float((_flat(seen.update) - noise - wanted).norm() / wanted.norm())
    assert distance < 1e-3 if shared else distance > 0.9


def _clipped(update: Any) -> dict[str, torch.Tensor]:
    norm = torch.cat([value.flatten() for value in update.values()]).norm()
    return {name: value / max(1.0, float(norm)) for name, value in update.items()}


def _gradient(truth: Any, seen: Any) -> dict[str, torch.Tensor]:
    from fedsim.models.base import normalize
    from fedsim.models.victim import rebuild

    model = rebuild(seen)
    named = dict(model.named_parameters())
    loss = torch.nn.functional.cross_entropy(
        model(normalize(truth.images, seen.model)), truth.labels
    )
    found = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    return _clipped({name: found[name] for name in seen.update})


def _flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_each_run_draws_noise_of_its_own_and_resumes_with_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = tmp_path / "homes"
    connect(monkeypatch, nodes(homes))
    found, kept = [], {}
    for name in ("first", "second"):
        pipeline.run(deployed(SMALL), out=tmp_path / name, workers=1, link=LINK)
        found.append(contents(tmp_path / name / "observations/noise"))
        kept[name] = contents(homes)
    assert not set(found[0].values()) & set(found[1].values())
    truth = {name for name in kept["first"] if "truth" in name}
    assert truth and all(kept["first"][name] == kept["second"][name] for name in truth)
    (tmp_path / "first" / "results.jsonl").unlink()
    for path in (tmp_path / "first" / "checkpoints").iterdir():
        path.unlink()
    connect(monkeypatch, nodes(homes))  # they have been restarted
    pipeline.run(deployed(SMALL), out=tmp_path / "first", resume=True, workers=1, link=LINK)
    assert contents(tmp_path / "first/observations/noise") == found[0]


@pytest.mark.parametrize(
    ("changes", "policy", "said"),
    [
        (
            {},
            Policy(stacks=[TINY["defenses"]["noise"]]),
            r"a node refuses: .*defenses\.none: this node's policy",
        ),
        ({"audit": {}}, None, "audit: canaries"),
        (
            {"observe": {"rounds": [1], "vantages": ["eavesdropper"]}},
            None,
            r"federation\.tls: true, and the link .* plaintext",
        ),
    ],
)
def test_what_a_node_or_the_link_refuses_ends_the_run_before_it_began(
    changes: dict[str, Any],
    policy: Policy | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect(monkeypatch, nodes(tmp_path / "homes", policy=policy))
    with pytest.raises(FedsimError, match=said):
        pipeline.run(deployed(TINY | changes), out=tmp_path / "out", workers=1, link=LINK)
    assert not (tmp_path / "out" / "scenario.yaml").exists()


def test_a_deployment_without_superlink_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsimError, match="--superlink"):
        pipeline.run(deployed(), out=tmp_path / "out")
    with pytest.raises(FedsimError, match="no deployed run"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "scenario.yaml").write_text(json.dumps(TINY))
        pipeline.collect(tmp_path / "other")


def test_the_noise_of_the_server_is_its_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {**TINY, "defenses": {"central": [{"name": "clip", "norm": 1.0}, "aggregate"]}}
    connect(monkeypatch, nodes(tmp_path / "homes"))
    out = tmp_path / "out"
    pipeline.run(deployed(plain), out=out, workers=1, link=LINK)
    secret = out / "server.secret"
    assert len(secret.read_bytes()) == 32 and secret.stat().st_mode & 0o077 == 0


def scenario() -> Scenario:
    (variant,) = expand(deployed(SMALL))
    return variant.scenario


def lie(monkeypatch: pytest.MonkeyPatch, home: Path, **said: Any) -> None:
    """Let node 1 answer a census with what is `said`."""
    apps = nodes(home)

    class Liar(NodeApp):
        def __call__(self, message: Message, context: Context) -> Message:
            told = {"version": wire.VERSION, wire.CLIENT: 1, "held": 479, "statistics": "{}"}
            config = ConfigRecord(told | said)
            return Message(RecordDict({wire.CONFIG: config}), reply_to=message)

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
        Deployment().clients_of(scenario(), tmp_path, LINK, None)


def test_another_version_is_told_before_what_it_may_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie(monkeypatch, tmp_path, version="999", **{wire.CLIENT: "one"})
    with pytest.raises(FedsimError, match=r"of version 999.*install the same fedsim"):
        Deployment().clients_of(scenario(), tmp_path, LINK, None)


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
    found = Deployment().clients_of(scenario(), tmp_path, LINK, None)
    kept = found.census.private_statistics["client"]
    assert len(kept) <= 20 and all(len(reason) <= 500 for reason in kept)
    assert all(reason.isprintable() for reason in kept)


def test_another_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    Deployment().check()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.99.0")
    with pytest.raises(FedsimError, match=r"knows Flower 1\.41\.x, and 1\.99\.0 is.*pip install"):
        Deployment().check()


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
    assert asked < _most_bytes(workload) < 2 * asked + 2 * 2**20
