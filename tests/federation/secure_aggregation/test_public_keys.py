"""Published keys that are another client's in another spelling, or nobody's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sum_support import MODEL, Sum, fresh, of, vectors

from fedsim.federation.secure_aggregation import secrets
from fedsim.federation.secure_aggregation.secrets import Published
from fedsim.federation.secure_aggregation.terms import AbortedError

P = 2**255 - 19
LOW = [0, 1, P - 1, *(int.from_bytes(bytes.fromhex(text), "little") for text in (
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
))]  # fmt: skip
"""As RFC 7748's reviewers list them."""


def shared(secret: bytes, key: bytes) -> bytes:
    """What X25519 makes of both."""
    public = X25519PublicKey.from_public_bytes(key)
    return X25519PrivateKey.from_private_bytes(secret).exchange(public)


def top_bit(key: bytes) -> bytes:
    """The same point to X25519, in other bytes."""
    return key[:31] + bytes([key[31] | 0x80])


@pytest.mark.parametrize("number", [*LOW, *(low + P for low in (0, 1)), P, 2**255 - 1, 2**256 - 1])
@pytest.mark.parametrize("at", [0, 32])
def test_a_key_of_no_client_is_refused(number: int, at: int) -> None:
    key = number.to_bytes(32, "little")
    good = secrets.public_of(bytes(range(32)))
    content = (key + good, good + key)[at == 32] + bytes(96)
    with pytest.raises(AbortedError, match="a public key is none"):
        Published.from_bytes(content)
    for length in (31, 33, 0):
        with pytest.raises(AbortedError, match="a public key is none"):
            secrets._check_public(good[:length] + bytes(max(0, length - 32)))


def test_low_order_points_are_those_that_make_every_secret_the_same() -> None:
    for number in LOW:
        with pytest.raises(ValueError, match="shared key"):
            shared(bytes(range(32)), number.to_bytes(32, "little"))


def _with_key(sum: Sum, colluding: int, key: bytes, kind: str = "masking") -> None:
    """Let a client publish what is not its own, signed by it."""
    own = sum.clients[colluding]._identity
    unsigned = replace(sum.directory[colluding], **{kind: key})
    statement = unsigned.statement(colluding, sum.terms.session)
    sum.directory[colluding] = replace(unsigned, signature=own.sign(statement))


@pytest.mark.parametrize("kind", ["sealing", "masking"])
def test_a_key_with_its_top_bit_set_is_refused_by_all(kind: str) -> None:
    sum = Sum(of(4), vectors(4, 6)).through(1)
    honest = getattr(sum.directory[0], kind)
    key = top_bit(honest)
    assert shared(bytes(range(32)), key) == shared(bytes(range(32)), honest)
    _with_key(sum, 3, key, kind)
    with pytest.raises(AbortedError, match="a public key is none"):
        sum.clients[1].shares(sum.directory)
    with pytest.raises(AbortedError, match="a public key is none"):
        sum.server.publish(sum.directory)


def test_the_same_key_for_two_kinds_is_refused() -> None:
    sum = Sum(of(4), vectors(4, 6)).through(1)
    _with_key(sum, 3, sum.directory[0].masking, "sealing")
    with pytest.raises(AbortedError, match="stands twice"):
        sum.clients[1].shares(sum.directory)


@pytest.mark.parametrize(
    "spelling",
    [
        # The point of `bytes(range(32))`, plus one of order 8, and plus one of order 2.
        "49d23b715a4d7187ac7564bc27da0ec7988aa4c3fa59c2f66adab4d76b4ef129",
        "5be15c7f1c5a05ccaf6c1d2c913baf3f4fcc7db06d9bca9f941d2a6ad1bc690d",
    ],
)
def test_masks_with_another_spelling_of_a_key_cancel_nothing(spelling: str) -> None:
    """Of four, 3 publishes the key of 0 in other bytes: both masks of 1 were the same, and gone.

    With those of 2 and 3 known, the server had the vector of 1 alone.
    """
    inputs, fixed = vectors(4, 50), {(0, "masking"): bytes(range(32))}
    sum = Sum(of(4), inputs, secret=lambda *of_whom: fixed.get(of_whom) or fresh("any"))
    sum.keys()
    key, secret = sum.directory[0].masking, sum.clients[1]._secret("masking")
    other = bytes.fromhex(spelling)
    assert other != key
    assert shared(secret, other) == shared(secret, key)
    boxes = {3: sum.clients[3].shares(sum.directory)}
    _with_key(sum, 3, other)
    sum.server.publish(sum.directory)
    boxes |= {client: sum.clients[client].shares(sum.directory) for client in range(3)}
    for client, sealed in boxes.items():
        sum.server.share(client, sealed)
    seed, session = sum.clients[1]._secret("seed"), sum.terms.session
    pair = {one: sum.directory[one].masking for one in (1, 2)}
    known = secrets.agree_key(secret, 2, pair, "mask", session)
    vector, _ = sum.clients[1].mask(sum.server.boxes_for(1), inputs[1].copy, MODEL)
    secrets.add_mask(vector, secrets.own_mask(seed, session), -1)
    secrets.add_mask(vector, known, -1)
    assert (vector == inputs[1]).mean() < 0.1
