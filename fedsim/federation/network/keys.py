"""Makes the keys of a whole federation: a folder for each party, with no more than it needs.

    DIR/superlink/   ca.crt, server.crt, server.key, superexec.secret
    DIR/gate/        ca.crt, server.crt, server.key
    DIR/node-0/      ca.crt, key; signing.key and peers.json, for secure sums
    DIR/runner/      ca.crt, superexec.secret, and each node's public key, node-0.pub

Whoever chooses the signing keys decides whose updates are added up in a secure sum: a node takes
its own and its peers' from its owner's files, and never from a server.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.federation.secure_aggregation.secrets import KEY, Identity
from fedsim.system import addresses, paths
from fedsim.types import FedsimError

# Certificates are valid from so long ago, for machines whose clocks are behind.
_CLOCK_SKEW = timedelta(minutes=5)


def _make_certificates(hosts: Sequence[str], *, days: int) -> dict[str, bytes]:
    """Makes ca.crt of an authority, and server.crt and server.key of a server, as PEM by name."""
    # The authority's own key is forgotten, so that nobody can vouch for another server with it.
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, server_name = _name("fedsim throw-away authority"), _name("fedsim server")
    now = datetime.now(UTC)

    def sign(
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        critical: Sequence[x509.ExtensionType],
        more: Sequence[x509.ExtensionType] = (),
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + timedelta(days=days))
        )
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        for extension in (x509.SubjectKeyIdentifier.from_public_key(key), authority, *more):
            builder = builder.add_extension(extension, critical=False)
        for extension in critical:
            builder = builder.add_extension(extension, critical=True)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    # The authority may sign servers' certificates, but no further authority.
    vouches = x509.BasicConstraints(ca=True, path_length=0), _usage(signs_certificates=True)
    serves = x509.BasicConstraints(ca=False, path_length=None), _usage(signs_certificates=False)
    named = (
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([_host(host) for host in hosts]),
    )
    return {
        "ca.crt": sign(ca_name, ca_key.public_key(), vouches),
        "server.crt": sign(server_name, server_key.public_key(), serves, named),
        "server.key": _private(server_key, PrivateFormat.PKCS8),
    }


def _make_node_key() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return _private(key, PrivateFormat.OpenSSH), line + b"\n"


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    # TLS looks for an address among the names of type IP, and for a name among those of type DNS.
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


KEY_NAME, PEERS_NAME = "signing.key", "peers.json"
"""What `fedsim keys` calls the files."""


def _make_signing_keys(count: int) -> tuple[list[bytes], bytes]:
    """Makes Ed25519 keys of `count` clients: (private keys, 32 bytes each; public keys as JSON)."""
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    public = {client: key.public_key().public_bytes_raw().hex() for client, key in enumerate(keys)}
    return [key.private_bytes_raw() for key in keys], json.dumps(public, indent=1).encode()


def read_identity(key: Path | None, peers: Path | None) -> Identity | None:
    """Reads a node's signing key and its peers' public keys; None if neither file is named.

    `key` is a file of 32 raw bytes, and `peers` is JSON of client -> public key as hexadecimal
    text. A `FedsimError` says what is missing, damaged, double or open to other users.
    """
    if key is None and peers is None:
        return None
    if key is None or peers is None:
        raise FedsimError("--signing-key, --peers: give both, or neither")
    secret = paths.read_named(key, "--signing-key", paths.TEXT)
    if len(secret) != KEY:
        raise FedsimError(
            f"--signing-key: {key}: expected {KEY} bytes, got {len(secret)}: a private Ed25519 key "
            f"without wrapping, as {KEY_NAME} of `fedsim keys` (docs/secure-aggregation.md)"
        )
    if key.stat().st_mode & 0o077:
        raise FedsimError(f"--signing-key: {key}: others may read it; chmod 600 {key}")
    return Identity(key=Ed25519PrivateKey.from_private_bytes(secret), peers=_peers(peers))


def _peers(path: Path) -> Mapping[int, bytes]:
    content = paths.read_named(path, "--peers", paths.TEXT)
    try:
        written = json.loads(content)
        found = {int(client): bytes.fromhex(key) for client, key in written.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise FedsimError(
            f"--peers: {path}: expected JSON of each client's public key: {error}"
        ) from error
    if odd := [client for client, key in found.items() if len(key) != KEY]:
        raise FedsimError(f"--peers: {path}: the key of client {odd[0]} is not {KEY} bytes")
    # Held against what was written: `1` and `01` are one client, and merge in `found`.
    if len(set(found.values())) < len(written):
        raise FedsimError(f"--peers: {path}: two clients have one key, so that one would be two")
    return found


def make_keys(folder: Path, nodes: int, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Writes a folder of keys for each party, and returns the folders.

    The parties are a SuperLink, its gate, the nodes and a runner, in this order. If a host is
    invalid, a file exists, or others may write into a folder, a `FedsimError` says so, and no file
    is written.

    Args:
        folder: Where the folders are made; they may exist, as mounted volumes do.
        nodes: Number of nodes.
        hosts: Names and IP addresses at which the SuperLink and the gate are reached, at least one.
        days: Time in days after which certificates end.
    """
    if not hosts:
        raise FedsimError("--host: name the SuperLink's and the gate's hosts, as nodes reach them")
    for host in hosts:
        if not addresses.is_host(host):
            raise FedsimError(
                f"--host: expected a name or an address alone, as in server.org, got {host!r}"
            )
    made = _make_certificates(hosts, days=days)
    root = {"ca.crt": made.pop("ca.crt")}
    # By this secret a SuperLink knows who may execute its tasks.
    secret = {"superexec.secret": secrets.token_bytes(32)}
    parties = {"superlink": {**made, **secret}, "gate": made}
    runner = dict(secret)
    signing, peers = _make_signing_keys(nodes)
    for client in range(nodes):
        key, runner[f"node-{client}.pub"] = _make_node_key()
        parties[f"node-{client}"] = {"key": key, KEY_NAME: signing[client], PEERS_NAME: peers}
    parties["runner"] = runner  # the last, so that its ca.crt says that all are there
    for party, files in parties.items():
        _prepare(folder / party, [folder / party / name for name in (*files, "ca.crt")])
    for party, files in parties.items():
        for name, content in {**files, **root}.items():
            path = folder / party / name
            # A new file that only its owner may read.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
    return [folder / party for party in parties]


def _prepare(folder: Path, files: Sequence[Path]) -> None:
    # One by one: `parents=True` would make the parents without this mode.
    for missing in reversed([folder, *folder.parents]):
        missing.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & 0o022:
        raise FedsimError(
            f"{folder} is no place for keys, since others may write into it: chmod 700 {folder}"
        )
    for file in files:
        if file.exists() or file.is_symlink():
            raise FedsimError(f"{file} exists: remove it, or name another folder")
