"""The signing key of a node, and those of its peers, by which it knows who is in a secure sum.

Whoever chooses them decides whose updates are added up: a node takes them from its owner's files,
and never from a server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsim.federation.secure_aggregation.secrets import KEY, Identity
from fedsim.system import paths
from fedsim.types import FedsimError

KEY_NAME, PEERS_NAME = "signing.key", "peers.json"
"""What `fedsim keys` calls the files."""


def make_signing_keys(count: int) -> tuple[list[bytes], bytes]:
    """Return as many new private keys, by client, and the file of all public ones."""
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    public = {client: key.public_key().public_bytes_raw().hex() for client, key in enumerate(keys)}
    return [key.private_bytes_raw() for key in keys], json.dumps(public, indent=1).encode()


def read_identity(key: Path | None, peers: Path | None) -> Identity | None:
    """Read a node's signing key and its peers' public ones; None without files.

    Raises:
        FedsimError: one is missing or damaged, or others may read the key.
    """
    if key is None and peers is None:
        return None
    if key is None or peers is None:
        raise FedsimError("--signing-key, --peers: give both, or neither")
    secret = paths.named(key, "--signing-key", paths.TEXT)
    if len(secret) != KEY:
        raise FedsimError(
            f"--signing-key: {key}: expected {KEY} bytes, got {len(secret)}: a private Ed25519 key "
            f"without wrapping, as {KEY_NAME} of `fedsim keys` (docs/secure-aggregation.md)"
        )
    if key.stat().st_mode & 0o077:
        raise FedsimError(f"--signing-key: {key}: others may read it; chmod 600 {key}")
    return Identity(key=Ed25519PrivateKey.from_private_bytes(secret), peers=_peers(peers))


def _peers(path: Path) -> Mapping[int, bytes]:
    content = paths.named(path, "--peers", paths.TEXT)
    try:
        written = json.loads(content)
        found = {int(client): bytes.fromhex(key) for client, key in written.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise FedsimError(
            f"--peers: {path}: expected JSON of each client's public key: {error}"
        ) from error
    if odd := [client for client, key in found.items() if len(key) != KEY]:
        raise FedsimError(f"--peers: {path}: the key of client {odd[0]} is not {KEY} bytes")
    if len(set(found.values())) < len(written):
        raise FedsimError(f"--peers: {path}: two clients have one key, so that one would be two")
    return found
