"""Each party gets what it needs and no more; a SuperLink accepts what `fedsim keys` makes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import typer
from flwr.proto.control_pb2 import UnregisterNodeRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from network_support import superlink
from typer.testing import CliRunner

from fedsim.cli.network import add_to
from fedsim.federation.network.keys import Authority, make_keys, read_identity
from fedsim.types import FedsimError

PARTIES = {
    "superlink": {"ca.crt", "server.crt", "server.key", "superexec.secret"},
    "gate": {"ca.crt", "server.crt", "server.key"},
    "runner": {"ca.crt", "superexec.secret", "node-0.pub", "node-1.pub"},
    "node-0": {"ca.crt", "key", "signing.key", "peers.json"},
    "node-1": {"ca.crt", "key", "signing.key", "peers.json"},
}


def names(folder: Path) -> dict[str, set[str]]:
    return {party.name: {file.name for file in party.iterdir()} for party in folder.iterdir()}


def test_each_party_gets_what_it_needs(tmp_path: Path) -> None:
    for volume in ("gate", "runner"):
        (tmp_path / volume).mkdir(mode=0o700)
    make_keys(tmp_path, 2, ["superlink", "gate"], days=1)
    assert names(tmp_path) == PARTIES
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    secrets = [
        (tmp_path / party / "superexec.secret").read_bytes()
        for party in PARTIES
        if "superexec.secret" in PARTIES[party]
    ]
    assert len(set(secrets)) == 1
    for own in ("key", "signing.key"):
        assert (tmp_path / "node-0" / own).read_bytes() != (tmp_path / "node-1" / own).read_bytes()
    for node in (0, 1):
        folder = tmp_path / f"node-{node}"
        known = read_identity(folder / "signing.key", folder / "peers.json")
        assert known is not None and known.peers[node] == known.public


def test_keys_are_never_replaced(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, ["superlink"], days=1)
    for path in tmp_path.rglob("gate/*"):
        path.unlink()
    with pytest.raises(FedsimError, match=r"exists: remove it"):
        make_keys(tmp_path, 1, ["superlink"], days=1)
    assert not list((tmp_path / "gate").iterdir())


def test_a_superlink_registers_each_key_once(tmp_path: Path) -> None:
    app = typer.Typer()
    add_to(app)
    made = CliRunner().invoke(
        app, ["keys", str(tmp_path / "keys"), "-n", "1", "--host", "::1", "--host", "127.0.0.1"]
    )
    assert made.exit_code == 0, made.output
    folder = tmp_path / "keys" / "superlink"
    authority = Authority(
        certificate=folder / "ca.crt",
        key=folder / "nowhere",
        server_certificate=folder / "server.crt",
        server_key=folder / "server.key",
    )
    runner = tmp_path / "keys" / "runner"
    with superlink(tmp_path, authority, folder / "superexec.secret") as link:
        words = ["register", str(runner / "node-0.pub"), "--superlink", link.address]
        words += ["--root-certificates", str(runner / "ca.crt")]
        first, second = (CliRunner().invoke(app, words) for _ in range(2))
        assert (first.exit_code, first.output) == (0, "node-0.pub: registered\n")
        assert (second.exit_code, second.output) == (0, "node-0.pub: was registered already\n")
        with link.node(tmp_path / "keys" / "node-0" / "key") as node:
            assert node.identifier
        with link.connect(ControlHttpClient) as control:
            control.UnregisterNode(UnregisterNodeRequest(node_id=node.identifier))
        third = CliRunner().invoke(app, words)
        assert third.exit_code == 2, "Flower lets in no node with this key again"
        assert "another key" in third.output
