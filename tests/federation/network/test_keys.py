"""Each party gets the keys that it needs and no more, and what is no key is refused."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from network_support import make_authority

from fedsim.federation.network.keys import _make_signing_keys, make_keys, read_identity
from fedsim.types import FedsimError

PARTIES = {
    "superlink": {"ca.crt", "server.crt", "server.key", "superexec.secret"},
    "gate": {"ca.crt", "server.crt", "server.key"},
    "runner": {"ca.crt", "superexec.secret", "node-0.pub", "node-1.pub"},
    "node-0": {"ca.crt", "key", "signing.key", "peers.json"},
    "node-1": {"ca.crt", "key", "signing.key", "peers.json"},
}


def test_each_party_gets_what_it_needs(tmp_path: Path) -> None:
    for volume in ("gate", "runner"):
        (tmp_path / volume).mkdir(mode=0o700)
    made = make_keys(tmp_path, 2, ["superlink", "gate"], days=1)
    assert {party.name: {file.name for file in party.iterdir()} for party in made} == PARTIES
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(party.stat().st_mode) for party in made} == {0o700}
    assert len({path.read_bytes() for path in tmp_path.rglob("superexec.secret")}) == 1
    for own in ("key", "signing.key"):
        assert (tmp_path / "node-0" / own).read_bytes() != (tmp_path / "node-1" / own).read_bytes()
    for node in (0, 1):
        folder = tmp_path / f"node-{node}"
        known = read_identity(folder / "signing.key", folder / "peers.json")
        assert known is not None and known.peers[node] == known.public


def test_a_node_key_is_of_p384_and_no_server_vouches_for_others(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, ["superlink"], days=1)
    key = load_ssh_private_key((tmp_path / "node-0" / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp384r1"
    public = load_ssh_public_key((tmp_path / "runner" / "node-0.pub").read_bytes())
    assert public == key.public_key()
    for name, signs, depth in (("server.crt", False, None), ("ca.crt", True, 0)):
        content = (tmp_path / "gate" / name).read_bytes()
        extensions = x509.load_pem_x509_certificate(content).extensions
        limits = extensions.get_extension_for_class(x509.BasicConstraints)
        assert limits.critical and limits.value == x509.BasicConstraints(signs, depth)
        usage = extensions.get_extension_for_class(x509.KeyUsage)
        assert usage.critical and usage.value.key_cert_sign == signs


def test_keys_are_never_replaced_nor_put_where_others_may_write(tmp_path: Path) -> None:
    make_keys(tmp_path, 1, ["superlink"], days=1)
    for path in tmp_path.rglob("gate/*"):
        path.unlink()
    with pytest.raises(FedsimError, match=r"exists: remove it"):
        make_keys(tmp_path, 1, ["superlink"], days=1)
    assert not list((tmp_path / "gate").iterdir())
    shared = tmp_path / "shared" / "gate"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(FedsimError, match="chmod 700"):
        make_keys(tmp_path / "shared", 1, ["superlink"], days=1)
    assert not list((tmp_path / "shared").rglob("*.crt"))


HOSTS = ["127.0.0.1", "::1", "superlink"]


def handshake(folder: Path, host: str, root: Path, days: int) -> str | None:
    """The version of TLS that a client of `host`, who trusts `root` alone, agrees on."""
    server = make_authority(folder, HOSTS, days=days)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(server.server_certificate, server.server_key)
    outside = ssl.create_default_context(cafile=root)
    outside.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it by default
    left, right = socket.socketpair()

    def serve() -> None:
        with left, suppress(OSError), inside.wrap_socket(left, server_side=True) as connection:
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with right, outside.wrap_socket(right, server_hostname=host) as connection:
            return connection.version()
    finally:
        thread.join()


@pytest.mark.parametrize("host", HOSTS)
def test_the_authority_vouches_for_the_named_hosts(tmp_path: Path, host: str) -> None:
    assert handshake(tmp_path / "keys", host, tmp_path / "keys" / "ca.crt", 1) == "TLSv1.3"


@pytest.mark.parametrize(
    ("host", "root", "days", "said"),
    [
        ("elsewhere", "keys", 1, "mismatch"),
        ("superlink", "other", 1, "verify failed"),
        ("superlink", "keys", 0, "expired"),
    ],
)
def test_it_vouches_for_nobody_else(
    tmp_path: Path, host: str, root: str, days: int, said: str
) -> None:
    make_authority(tmp_path / "other", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match=said):
        handshake(tmp_path / "keys", host, tmp_path / root / "ca.crt", days)


@pytest.fixture
def signing_key(tmp_path: Path) -> Path:
    """A client's signing key, beside the `peers.json` that lists it."""
    (secret,), public = _make_signing_keys(1)
    (tmp_path / "peers.json").write_bytes(public)
    path = tmp_path / "signing.key"
    path.write_bytes(secret)
    path.chmod(0o600)
    return path


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
def test_peers_that_are_none(content: str, message: str, signing_key: Path) -> None:
    peers = signing_key.with_name("peers.json")
    peers.write_text(content)
    with pytest.raises(FedsimError, match=f"--peers: .*{message}"):
        read_identity(signing_key, peers)


def test_signing_keys_that_are_none(signing_key: Path) -> None:
    peers = signing_key.with_name("peers.json")
    assert read_identity(None, None) is None
    with pytest.raises(FedsimError, match="give both, or neither"):
        read_identity(signing_key, None)
    with pytest.raises(FedsimError, match=r"--signing-key: .*check the path"):
        read_identity(signing_key.with_name("missing"), peers)
    signing_key.chmod(0o644)
    with pytest.raises(FedsimError, match="others may read it"):
        read_identity(signing_key, peers)
    signing_key.chmod(0o600)
    signing_key.write_bytes(b"short")
    with pytest.raises(FedsimError, match="expected 32 bytes, got 5"):
        read_identity(signing_key, peers)
