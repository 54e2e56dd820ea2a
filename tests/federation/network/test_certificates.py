"""Certificates verify the server and nobody else; files are of their owner alone, and stay."""

from __future__ import annotations

import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from network_support import node_key

from fedsim.federation.network.keys import Authority, make_authority, make_node_key
from fedsim.types import FedsimError


def handshake(server: Authority, roots: Path, host: str) -> str:
    """The version of TLS that a client of `roots` agrees on with `server`, known as `host`."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(server.server_certificate, server.server_key)
    outside = ssl.create_default_context(cafile=roots)
    outside.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it by default

    def serve(end: socket.socket) -> None:
        try:
            with inside.wrap_socket(end, server_side=True) as connection:
                connection.recv(1)
        except OSError:
            end.close()

    left, right = socket.socketpair()
    thread = threading.Thread(target=serve, args=(left,))
    thread.start()
    try:
        with right, outside.wrap_socket(right, server_hostname=host) as connection:
            return str(connection.version())
    finally:
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "superlink"])
def test_the_authority_vouches_for_the_named_hosts(tmp_path: Path, host: str) -> None:
    authority = make_authority(tmp_path / "keys", ["127.0.0.1", "::1", "superlink"])
    assert handshake(authority, authority.certificate, host) == "TLSv1.3"


@pytest.mark.parametrize(
    ("host", "other", "days", "said"),
    [
        ("elsewhere", False, 1, "mismatch"),
        ("superlink", True, 1, "verify failed"),
        ("superlink", False, 0, "expired"),
    ],
)
def test_it_vouches_for_nobody_else(
    host: str, other: bool, days: int, said: str, tmp_path: Path
) -> None:
    authority = make_authority(tmp_path / "keys", ["superlink"], days=days)
    trusted = make_authority(tmp_path / "other", ["superlink"]) if other else authority
    with pytest.raises(ssl.SSLCertVerificationError, match=said):
        handshake(authority, trusted.certificate, host)


def test_files_are_of_their_owner_alone_and_stay(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    make_authority(folder, ["superlink"])
    make_node_key(folder / "node0")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FedsimError, match=r"ca\.crt exists"):
        make_authority(folder, ["superlink"])
    with pytest.raises(FedsimError, match="node0 exists"):
        make_node_key(folder / "node0")
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_keys_are_not_put_where_others_may_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(FedsimError, match="chmod 700"):
        make_node_key(tmp_path / "node0")


def test_flower_and_openssh_read_a_node_s_key(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "node0")
    key = node_key(tmp_path / "node0")
    assert key.curve.name == "secp384r1"
    assert try_load_public_key(public) == public_key_to_bytes(key.public_key())
    try:
        derived = subprocess.run(
            ["ssh-keygen", "-y", "-f", str(tmp_path / "node0")], capture_output=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("no ssh-keygen")
    assert derived.stdout.split()[:2] == public.read_bytes().split()
