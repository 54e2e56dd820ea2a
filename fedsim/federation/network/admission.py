"""What passes the gate: requests of one form, signed by a node's key, and each signature once.

Flower signs no more of a request than its time, and accepts a signature for five minutes. It reads
a whole body before it asks who sent it, and believes a node that says that its message comes from
another node, or from the server. None of this passes here.
"""

from __future__ import annotations

import re
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

import h11
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError

BODY_LIMIT = 2 * 2**30
"""Most bytes of a request's body: protocol buffers, which carry it, cannot be larger."""
REPLIES = b"/v1/fleet/push-messages"
"""Path at which nodes announce replies, whose contents follow as objects of their own."""

# The paths that pass, as they are on the wire: no escape, dot, query or second slash.
_FLEET = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
_PUBLIC_KEY, _TIMESTAMP, _SIGNATURE = b"flwr-public-key", b"flwr-timestamp", b"flwr-signature"
# Headers that the SuperLink gets to see, besides those of Flower (`flwr-...`).
_PASSED_ON = {b"content-length", b"content-type", b"accept"}
# Age of a signature that Flower accepts, and how far ahead of the clock it may be.
_OLDEST_SECONDS, _NEWEST_SECONDS = 305, 5
# Signatures remembered at once, about 150 MB; with more, nodes have to wait.
_SIGNATURES = 1_000_000
# Limit of a body signed by a key of which the SuperLink has not yet accepted a request.
_STRANGER_BYTES = 64 * 1024
# Limit of an announcement of replies (about 150 bytes for each tensor), which is held whole.
_REPLIES_BYTES = 16 * 2**20
# Limit of all announcements of replies that are held at once, but for small ones.
_HELD_BYTES = 64 * 2**20
# Identifier by which Flower addresses the server.
_SERVER = 1


class Refusal(Exception):  # noqa: N818 - reads as what happened
    """Raised with an HTTP `status` and a text, the `reason`, for a request that does not pass.

    Flower's nodes end themselves at a 401 and take a 403 for the end of the run. They try again,
    signed anew, after 502, 503 and 504.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class _Signature:
    """Identifies a signature that is valid, and the key (PEM) that made it."""

    r: int
    """The first of the two numbers of an ECDSA signature (r, s). Whoever saw a signature can write
    it in other ways, and negate s, and it stays valid. Nobody can make a valid one of another r
    without the key."""
    key: bytes


def vet(request: h11.Request, body_limit: int) -> dict[bytes, bytes]:
    """Returns the headers of a request that passes, by name; content-length is among them.

    Any other request raises a `Refusal`, as does a body of more than `body_limit` bytes or, at the
    path `REPLIES`, of more than 16 MiB.
    """
    headers = dict(request.headers)
    if not _FLEET.fullmatch(request.target):
        raise Refusal(404, "not the Fleet API")
    if request.method != b"POST":
        raise Refusal(405, "not POST")
    # Two readers of a repeated header may disagree on where a request ends, and smuggle a second
    # one in.
    if len(request.headers) != len(headers):
        raise Refusal(400, "a header twice")
    # After an upgrade the gate would pass on what it cannot read.
    if b"upgrade" in headers:
        raise Refusal(400, "asks for another protocol")
    if b"transfer-encoding" in headers or b"content-length" not in headers:
        raise Refusal(411, "no length in advance")
    limit = min(body_limit, _REPLIES_BYTES) if request.target == REPLIES else body_limit
    if length(headers) > limit:
        raise Refusal(413, f"body of {length(headers)} bytes, more than {limit}")
    return headers


def length(headers: Mapping[bytes, bytes]) -> int:
    """Returns the size in bytes of the body that follows `headers`, which `vet` has returned."""
    return int(headers[b"content-length"])


def select_headers(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Returns the (name, value) of vetted `headers` that the gate passes on to the SuperLink.

    These are content-length, content-type, accept and flwr-*, all in lower case.
    """
    return [
        (name, value)
        for name, value in headers.items()
        if name in _PASSED_ON or name.startswith(b"flwr-")
    ]


def check_replies(body: bytes) -> None:
    """Raises a Refusal (400) for a request `body` that announces anything but the node's replies.

    The SuperLink checks only that the node is the one whose key signed.
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError as error:
        raise Refusal(400, "no announcement of replies") from error
    for message in request.messages_list:
        metadata = message.metadata
        if metadata.src_node_id != request.node.node_id:
            raise Refusal(400, f"node {request.node.node_id} as {metadata.src_node_id}")
        if not metadata.reply_to_message_id or metadata.dst_node_id != _SERVER:
            raise Refusal(400, f"node {request.node.node_id} sends what is no reply")


class Signatures:
    """Lets each signature pass once, and knows whose requests the SuperLink accepted.

    Signatures of before `since` (seconds since 1970) do not pass, as another gate may have let them
    pass. A node whose clock is ahead can still make up to 5 s of them pass. While `capacity` (by
    default a million) signatures are remembered, every further one is refused (503).
    """

    def __init__(self, since: float, capacity: int = _SIGNATURES) -> None:
        self._since, self._capacity = since, capacity
        self._used: dict[int, float] = {}  # a signature's r -> when it was used, in this order
        self._accepted: set[bytes] = set()
        self._held: Counter[bytes] = Counter()  # bytes of announcements, by key

    def claim(self, headers: Mapping[bytes, bytes]) -> _Signature:
        """Returns the signature among vetted `headers`, with its `key` (PEM), and marks it as used.

        One that is missing, invalid, outside its time or used before raises a `Refusal`. So does a
        body over 64 KiB with a key of which the SuperLink has accepted no request.
        """
        signature, signed_at = _verify(headers)
        now = time.time()
        if not -_NEWEST_SECONDS < now - signed_at < _OLDEST_SECONDS:
            ahead = f"{abs(signed_at - now):.0f} s {'ahead' if signed_at > now else 'old'}"
            raise Refusal(401, f"signature outside its time ({ahead})")
        if signed_at < self._since:
            raise Refusal(503, "signed before the gate's start; sign anew")
        if signature.key not in self._accepted and length(headers) > _STRANGER_BYTES:
            raise Refusal(503, "a large body before a small one was accepted; try later")
        self._forget(now)
        if signature.r in self._used:
            raise Refusal(401, "signature used before")
        if len(self._used) >= self._capacity:
            raise Refusal(503, "too many signatures at once; try later")
        self._used[signature.r] = now
        return signature

    def is_node(self, key: bytes) -> bool:
        """Returns whether the SuperLink has accepted a request signed with `key` (PEM)."""
        return key in self._accepted

    @contextmanager
    def holding(self, key: bytes, size: int) -> Iterator[None]:
        """Counts `size` bytes as held for `key` (PEM) in a `with` block.

        A Refusal (503) says that the key would hold more than 16 MiB. For a `size` over 64 KiB it
        also says that all keys would hold more than 64 MiB.
        """
        # Small ones pass even if large ones have taken all there is, so that no node blocks the
        # others.
        is_small = size <= _STRANGER_BYTES
        if self._held[key] + size > _REPLIES_BYTES or (
            not is_small and self._held.total() + size > _HELD_BYTES
        ):
            raise Refusal(503, "too large announcements at once; try later")
        self._held[key] += size
        try:
            yield
        finally:
            self._held[key] -= size
            self._held += Counter()  # drops keys of which nothing is held, so that none pile up

    def settle(self, signature: _Signature, *, is_accepted: bool) -> None:
        """Records whether the SuperLink accepted the request of a claimed `signature`.

        A stranger's signature that it did not accept is forgotten, and may be claimed again.
        """
        if is_accepted:
            self._accepted.add(signature.key)
        # Keys that were never accepted are not remembered, so that strangers fill no memory.
        elif signature.key not in self._accepted:
            self._used.pop(signature.r, None)

    def _forget(self, now: float) -> None:
        """Drops signatures whose time is over."""
        while self._used:
            # In order of use: the first that still counts ends the search.
            first = next(iter(self._used))
            if now - self._used[first] < _OLDEST_SECONDS + _NEWEST_SECONDS:
                break
            del self._used[first]


def _verify(headers: Mapping[bytes, bytes]) -> tuple[_Signature, float]:
    """Verifies the signature among vetted headers; returns it and its time (s since 1970)."""
    try:
        key = b64decode(headers[_PUBLIC_KEY], validate=True)
        signature = b64decode(headers[_SIGNATURE], validate=True)
        timestamp = headers[_TIMESTAMP]
        signed_at = datetime.fromisoformat(timestamp.decode("ascii")).timestamp()
        r, _ = decode_dss_signature(signature)
        _public_key(key).verify(signature, timestamp, ec.ECDSA(hashes.SHA256()))
    except KeyError as error:
        raise Refusal(401, f"no {error.args[0].decode()}") from error
    except (ValueError, ArithmeticError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise Refusal(401, "invalid signature") from error
    return _Signature(r, key), signed_at


@lru_cache(maxsize=1024)
def _public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    key = load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not of an elliptic curve")
    return key
