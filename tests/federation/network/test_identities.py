"""The files by which a node signs and knows its peers, and the nodes that lack them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nodes_support import LINK, TINY, connect, nodes

from fedsim import pipeline
from fedsim.federation.network.keys import make_signing_keys, read_identity
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.types import FedsimError

SECURE = {
    **TINY,
    "defenses": {"secure": [{"name": "clip", "norm": 1.0}, "secure_aggregation"]},
    "federation": {"engine": "deployment"},
}


def _files(folder: Path, count: int) -> list[Path]:
    """The keys of so many clients; `peers.json` beside them."""
    secret, public = make_signing_keys(count)
    folder.mkdir(exist_ok=True)
    (folder / "peers.json").write_bytes(public)
    found = [folder / f"{client}.key" for client in range(count)]
    for path, content in zip(found, secret, strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
    return found


def _nodes(home: Path, files: list[Path], policy: Policy | None = None) -> list[NodeApp]:
    return [
        NodeApp(
            client,
            "scenario",
            home / f"node-{client}",
            policy or Policy(),
            shared_seed=False,
            identity=read_identity(path, path.with_name("peers.json")),
        )
        for client, path in enumerate(files)
    ]


@pytest.mark.usefixtures("attacks_here")
def test_nodes_with_secrets_of_their_own_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two runs have the same masked vector, and the truth of it stays with the node."""
    seen = []
    for run in ("one", "two"):
        files = _files(tmp_path / run, 3)
        connect(monkeypatch, _nodes(tmp_path / run / "homes", files))
        pipeline.run(SECURE, out=tmp_path / run / "out", workers=1, link=LINK)
        rounds = (tmp_path / run / "out" / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(row)["aggregated"] for row in rounds] == [3, 3]
        masked = tmp_path / run / "out" / "observations" / "secure" / "round-0002"
        seen.append((masked / "client-0000-b1-t0.safetensors").read_bytes())
        assert not (tmp_path / run / "out" / "truth").exists()
        pipeline.collect(
            tmp_path / run / "out", homes=sorted((tmp_path / run / "homes").iterdir()), workers=1
        )
        rows = (tmp_path / run / "out" / "results.jsonl").read_text().splitlines()
        assert {json.loads(row)["status"] for row in rows} == {"ok"}
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "knows no keys of its peers"),
        ("other", "client 0 has another key there than --signing-key"),
        ("few", "no key of client 2, who is to take part"),
        ("cohort", "minimum_cohort"),
    ],
)
def test_a_node_that_cannot_know_its_peers_takes_no_part(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _files(tmp_path / "keys", 3)
    policy = Policy(minimum_cohort=4) if change == "cohort" else None
    if change == "other":
        files[0].write_bytes(bytes(range(32)))
    if change == "few":
        peers = files[0].with_name("peers.json")
        written = json.loads(peers.read_text())
        peers.write_text(json.dumps({key: written[key] for key in ("0", "1")}))
    apps = (
        nodes(tmp_path / "homes") if change == "none" else _nodes(tmp_path / "homes", files, policy)
    )
    connect(monkeypatch, apps)
    with pytest.raises(FedsimError, match=message):
        pipeline.run(SECURE, out=tmp_path / "out", workers=1, link=LINK)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected JSON of each client"),
        ("{", "expected JSON of each client"),
        ('{"0": "xyz"}', "expected JSON of each client"),
        ('{"zero": "00"}', "expected JSON of each client"),
        ('{"0": "00"}', "the key of client 0 is not 32 bytes"),
        (json.dumps({"0": "11" * 32, "1": "11" * 32}), "two clients have one key"),
        (json.dumps({"0": "11" * 32, "00": "22" * 32}), "two clients have one key"),
    ],
)
def test_peers_that_are_none(content: str, message: str, tmp_path: Path) -> None:
    (key,) = _files(tmp_path, 1)
    peers = tmp_path / "peers.json"
    peers.write_text(content)
    with pytest.raises(FedsimError, match=f"--peers: .*{message}"):
        read_identity(key, peers)


def test_signing_keys_that_are_none(tmp_path: Path) -> None:
    (key,) = _files(tmp_path, 1)
    peers = tmp_path / "peers.json"
    assert read_identity(None, None) is None
    with pytest.raises(FedsimError, match="give both, or neither"):
        read_identity(key, None)
    with pytest.raises(FedsimError, match=r"--signing-key: .*check the path"):
        read_identity(tmp_path / "missing", peers)
    key.chmod(0o644)
    with pytest.raises(FedsimError, match="others may read it"):
        read_identity(key, peers)
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(FedsimError, match="expected 32 bytes, got 5"):
        read_identity(key, peers)


def test_a_node_with_keys_of_another_client_does_not_start(tmp_path: Path) -> None:
    files = _files(tmp_path / "keys", 2)
    for app in _nodes(tmp_path / "homes", files):
        app.refuse_other_identity()
    for app in _nodes(tmp_path / "swapped", files[::-1]):
        with pytest.raises(FedsimError, match=r"another key there.*check --client"):
            app.refuse_other_identity()
    (stranger,) = _files(tmp_path / "others", 1)
    with pytest.raises(FedsimError, match="check --client"):
        _nodes(tmp_path / "strangers", [stranger.rename(files[0])])[0].refuse_other_identity()
