"""Hides a vector: keys that two agree on, streams made of them, and secrets in shares.

Every primitive is a library's: X25519, HKDF-SHA256, AES-256 in counter mode, ChaCha20-Poly1305 and
Ed25519 of `cryptography`, Shamir's sharing over GF(2^128) of `pycryptodome`. `session` is that of
`Terms`, so that no two sums share a key, mask or signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedsim.federation.secure_aggregation.terms import AbortedError, Ring

SIGNATURE = 64
KEY = 32


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A client's signing key, and the public keys of all clients."""

    key: Ed25519PrivateKey
    peers: Mapping[int, bytes]
    """Ed25519 public key of each client of the sum, by client; its own is among them."""

    def sign(self, statement: bytes) -> bytes:
        """Returns the client's Ed25519 signature of a statement; 64 bytes."""
        return self.key.sign(statement)

    @property
    def public(self) -> bytes:
        """Public half of `key`, 32 bytes."""
        return self.key.public_key().public_bytes_raw()

    def vouches(self, client: int, statement: bytes, signature: bytes) -> bool:
        """Returns whether `client` signed `statement` with `signature`; False if it is no peer."""
        try:
            public = Ed25519PublicKey.from_public_bytes(self.peers[client])
            public.verify(signature, statement)
        except (KeyError, InvalidSignature, ValueError):  # bytes that are no key, too
            return False
        return True


SECRET = 32
"""Bytes of a key and of a seed."""
_HALF = 16
_INDEX = 2
SHARE = _INDEX + SECRET
"""Bytes of a share of a secret."""
_TAG = 16
BOX = 2 * SHARE + _TAG
"""Bytes of a box that one client sends another: a share of each of its two secrets, encrypted."""
_PRIME = 2**255 - 19
# Points whose order divides 8, on the curve or its twist, by their canonical u-coordinate.
_LOW_ORDER = {
    0,
    1,
    _PRIME - 1,
    0xB8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
}
_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)


def digest(*parts: bytes) -> bytes:
    """Returns the SHA-256 digest of `parts`, each preceded by its length in 8 bytes, big-endian."""
    whole = hashlib.sha256()
    for part in parts:
        # The lengths keep lists of parts apart that read the same once they are joined.
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.digest()


def public_of(secret: bytes) -> bytes:
    """Returns the X25519 public key, 32 bytes, of a `secret` key; a ValueError if not 32 bytes."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _check_public(key: bytes) -> None:
    # X25519 ignores the highest bit and reduces modulo 2^255 - 19, so that one point has several
    # encodings. Points of low order make every shared secret the same.
    number = int.from_bytes(key, "little")
    if len(key) != SECRET or number >= _PRIME or number in _LOW_ORDER:
        raise AbortedError("a public key is none: not canonical, or of low order")


def agree_key(
    secret: bytes, other: int, keys: Mapping[int, bytes], purpose: str, session: bytes
) -> bytes:
    """Returns 32 bytes that only two clients can compute.

    They depend on both clients' numbers and on the bytes of their public keys. Otherwise a client
    could publish another's key, or one that gives the same shared secret.

    Args:
        secret: X25519 secret key of one of the two, 32 bytes.
        other: Number of the other client.
        keys: X25519 public keys of both, by client; one that is none is an AbortedError.
        purpose: What the bytes are for; other purposes give other bytes.
        session: `Terms.session` of the sum.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(
            X25519PublicKey.from_public_bytes(keys[other])
        )
    except ValueError as error:
        # The library refuses a shared secret of zeros, which points of low order give.
        raise AbortedError(f"a public key is none: {error}") from error
    who = list_entries(keys)
    info = b"fedsim secure aggregation\0" + who + purpose.encode() + b"\0" + session
    return HKDF(hashes.SHA256(), SECRET, None, info).derive(shared)


def own_mask(seed: bytes, session: bytes) -> bytes:
    """Returns the key, 32 bytes, of a client's own mask in the sum `session`, made of a `seed`."""
    return digest(b"own mask", session, seed)


def commit(seed: bytes, session: bytes) -> bytes:
    """Returns a commitment, 32 bytes, to the `seed` of a client's own mask in the sum `session`."""
    return digest(b"commitment", session, seed)


def add_mask(vector: Ring, key: bytes, sign: int) -> None:
    """Adds the stream of `key`, 32 bytes, to `vector` in place; `sign` is 1, or -1 to take it off.

    A key must mask no second vector.
    """
    # A counter that begins at 0 is safe, as no key masks a second vector.
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    # `update_into` demands room for one block of AES, less a byte, beyond the data.
    buffer = bytearray(_CHUNK + 15)
    numbers = _CHUNK // vector.itemsize
    # One byte order on every machine: otherwise two clients' masks would not cancel.
    little: np.dtype[Any] = vector.dtype.newbyteorder("<")
    for at in range(0, len(vector), numbers):
        part = vector[at : at + numbers]
        # Encrypted zeros are the bare key stream.
        written = stream.update_into(memoryview(_ZEROS)[: part.nbytes], buffer)
        mask: NDArray[Any] = np.frombuffer(buffer, little, written // vector.itemsize)
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def split(secret: bytes, needed: int, holders: int) -> list[bytes]:
    """Splits a secret of 32 bytes into `holders` shares of `SHARE` bytes each.

    Shares are numbered from 1, in their first two bytes. Any `needed`, from 1 to `holders`, of them
    reveal the secret, and fewer tell nothing of it.
    """
    # Shamir's field has 128 bits: each half of the secret is shared by itself.
    halves = [
        Shamir.split(needed, holders, secret[at : at + _HALF], ssss=False) for at in (0, _HALF)
    ]
    return [
        index.to_bytes(_INDEX, "big") + bytes(first) + bytes(second)
        for (index, first), (_, second) in zip(*halves, strict=True)
    ]


def join_shares(shares: Sequence[bytes]) -> bytes:
    """Returns the secret of 32 bytes that `shares` reveal; too few shares give wrong bytes.

    Shares that are repeated or of another length are an AbortedError.
    """
    numbered = {int.from_bytes(share[:_INDEX], "big"): share for share in shares}
    if len(numbered) < len(shares) or any(len(share) != SHARE for share in shares):
        raise AbortedError("shares are repeated or malformed")
    return b"".join(
        Shamir.combine(
            [(index, share[at : at + _HALF]) for index, share in numbered.items()], ssss=False
        )
        for at in (_INDEX, _INDEX + _HALF)
    )


def seal(key: bytes, shares: bytes, way: bytes) -> bytes:
    """Encrypts `shares` under a `key` of 32 bytes that must encrypt nothing else; returns a box.

    `way` names sender and receiver. It is authenticated, and needed to open the box.
    """
    # One nonce for all is safe for the same reason: the key is of this message alone.
    return ChaCha20Poly1305(key).encrypt(bytes(12), shares, way)


def open_box(key: bytes, box: bytes, way: bytes) -> bytes:
    """Returns what `seal` put into `box` with the same `key` and `way`; else an AbortedError."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, way)
    except InvalidTag as error:
        raise AbortedError("a client's shares cannot be decrypted: they were changed") from error


def list_entries(entries: Mapping[int, bytes]) -> bytes:
    """Returns an encoding of `entries`, bytes by client, that does not depend on their order."""
    return b"".join(digest(str(client).encode(), entries[client]) for client in sorted(entries))


# Two public keys, a commitment and a signature.
_LENGTH = 2 * KEY + SECRET + SIGNATURE


@dataclass(frozen=True, kw_only=True)
class Published:
    """A client's public keys for one sum, with its signature."""

    sealing: bytes
    """X25519 public key that encrypts the shares which others send to the client."""
    masking: bytes
    """X25519 public key of the masks that the client has in common with others."""
    commitment: bytes
    """Commitment to the seed of the client's own mask."""
    signature: bytes
    """Ed25519 signature of both keys, the commitment and the sum's session; 64 bytes."""

    def statement(self, client: int, session: bytes) -> bytes:
        """Returns the digest, 32 bytes, that `client` signs in the sum called `session`."""
        who = str(client).encode()
        # The session is signed, too, so that keys of an earlier sum cannot be shown again.
        return digest(b"keys", session, who, self.sealing, self.masking, self.commitment)

    def to_bytes(self) -> bytes:
        """Returns all fields joined, 160 bytes."""
        return self.sealing + self.masking + self.commitment + self.signature

    @classmethod
    def from_bytes(cls, content: bytes) -> Published:
        """Reads what `to_bytes` returned, signature unchecked; an AbortedError if malformed."""
        if len(content) != _LENGTH:
            raise AbortedError(f"published keys are {len(content)} bytes, expected {_LENGTH}")
        for at in (0, KEY):
            _check_public(content[at : at + KEY])
        return cls(
            sealing=content[:KEY],
            masking=content[KEY : 2 * KEY],
            commitment=content[2 * KEY : 2 * KEY + SECRET],
            signature=content[-SIGNATURE:],
        )


Directory = Mapping[int, Published]
"""Public keys of each client, by client, as the server shows them to all."""


def directory_digest(directory: Directory) -> bytes:
    """Returns a digest, 32 bytes, of a directory, by which clients know that they saw the same."""
    return digest(b"directory", list_entries({c: one.to_bytes() for c, one in directory.items()}))


def check_keys(directory: Directory) -> None:
    """Refuses, by an AbortedError, a directory with an invalid key, or one that stands twice."""
    keys = [key for one in directory.values() for key in (one.sealing, one.masking)]
    for key in keys:
        _check_public(key)
    if len(set(keys)) != len(keys):
        raise AbortedError("a key stands twice in the directory")
