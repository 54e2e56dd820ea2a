"""Each party gets what it needs and no more."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedsim.federation.network.keys import make_keys, read_identity
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
