"""What a client publishes at the beginning of a secure sum, and what all of that is together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedsim.federation.secure_aggregation.identity import KEY, SIGNATURE
from fedsim.federation.secure_aggregation.secrets import SECRET, check_public, digest, listed
from fedsim.federation.secure_aggregation.terms import AbortedError

_LENGTH = 2 * KEY + SECRET + SIGNATURE


@dataclass(frozen=True, kw_only=True)
class Published:
    """A client's public keys of one sum, signed by it."""

    sealing: bytes
    """X25519: for the shares that others send it."""
    masking: bytes
    """X25519: for the masks that it has in common with others."""
    commitment: bytes
    """To the seed of its own mask."""
    signature: bytes
    """Ed25519, of all that and the sum's session."""

    def statement(self, client: int, session: bytes) -> bytes:
        """What is signed."""
        who = str(client).encode()
        return digest(b"keys", session, who, self.sealing, self.masking, self.commitment)

    def to_bytes(self) -> bytes:
        """Of fixed length."""
        return self.sealing + self.masking + self.commitment + self.signature

    @classmethod
    def from_bytes(cls, content: bytes) -> Published:
        """Read what `to_bytes` returned.

        Raises:
            AbortedError: it has another length, or a key is none.
        """
        if len(content) != _LENGTH:
            raise AbortedError(f"published keys are {len(content)} bytes, expected {_LENGTH}")
        for at in (0, KEY):
            check_public(content[at : at + KEY])
        return cls(
            sealing=content[:KEY],
            masking=content[KEY : 2 * KEY],
            commitment=content[2 * KEY : 2 * KEY + SECRET],
            signature=content[-SIGNATURE:],
        )


Directory = Mapping[int, Published]
"""What each client has published, as the server shows it to all."""


def digest_of(directory: Directory) -> bytes:
    """By which two clients find out that they were shown the same directory."""
    return digest(b"directory", listed({c: one.to_bytes() for c, one in directory.items()}))


def check_keys(directory: Directory) -> None:
    """Refuse a directory in which a key is none or stands twice: then one client would be two.

    Raises:
        AbortedError: one is or does.
    """
    keys = [key for one in directory.values() for key in (one.sealing, one.masking)]
    for key in keys:
        check_public(key)
    if len(set(keys)) != len(keys):
        raise AbortedError("a key stands twice in the directory")
