"""By which key each client signs, and whose keys a client trusts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = 64
KEY = 32


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A client's signing key, and the other clients' public ones as it knows them."""

    key: Ed25519PrivateKey
    peers: Mapping[int, bytes]
    """Client -> Ed25519 public key, 32 bytes; of all clients that it adds its vector to."""

    def sign(self, statement: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self.key.sign(statement)

    @property
    def public(self) -> bytes:
        """The public key of `key`."""
        return self.key.public_key().public_bytes_raw()

    def vouches(self, client: int, statement: bytes, signature: bytes) -> bool:
        """Whether `client` has signed `statement`."""
        return client in self.peers and is_signed(self.peers[client], statement, signature)


def is_signed(public: bytes, statement: bytes, signature: bytes) -> bool:
    """Whether whoever has the key of `public` has signed `statement`."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True
