"""What passes the gate: requests of one form, and each signature once.

Flower signs no more of a request than its time, and accepts the signature for five minutes: whoever
saw one can use it for any request of that node, and the gate lets none pass twice.
"""

from __future__ import annotations

import re
import time
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime

import h11
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

BODY_LIMIT = 2 * 2**30
"""Bytes of a request's body: protocol buffers, which carry it, end there."""

_FLEET = re.compile(rb"/v1/fleet/[a-z]+(-[a-z]+)*")
"""The paths that pass, as they are on the wire: no escape, dot, query or second slash."""
_PUBLIC_KEY, _TIMESTAMP, _SIGNATURE = b"flwr-public-key", b"flwr-timestamp", b"flwr-signature"
_PASSED_ON = {b"content-length", b"content-type", b"accept"}
"""Headers that the SuperLink gets to see, besides those of Flower (`flwr-...`)."""
_OLDEST_SECONDS, _NEWEST_SECONDS = 305, 5
"""Age of a signature that Flower accepts, and how far ahead of the clock it may be."""
_SIGNATURES = 1_000_000
"""Signatures remembered at once, about 150 MB; with more, nodes have to wait."""


class Refusal(Exception):  # noqa: N818 - reads as what happened
    """What a client asked does not pass; the text says why, to it and to the log.

    Flower's nodes end themselves at a 401, take a 403 for the end of the run, and try again, signed
    anew, after 502, 503 and 504.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def vet(request: h11.Request, body_limit: int) -> dict[bytes, bytes]:
    """Returns the headers of a request that passes, each once, among them its content-length.

    Raises:
        Refusal: it does not pass.
    """
    names = [name for name, _ in request.headers]
    headers = dict(request.headers)
    if not _FLEET.fullmatch(request.target):
        raise Refusal(404, "not the Fleet API")
    if request.method != b"POST":
        raise Refusal(405, "not POST")
    if len(names) != len(headers):
        raise Refusal(400, "a header twice")
    if b"upgrade" in headers:
        raise Refusal(400, "asks for another protocol")
    if b"transfer-encoding" in headers or b"content-length" not in headers:
        raise Refusal(411, "no length in advance")
    if int(headers[b"content-length"]) > body_limit:
        raise Refusal(413, f"body of {int(headers[b'content-length'])} bytes")
    return headers


def passed_on(headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Those of a client's headers that the SuperLink gets to see."""
    return [
        (name, value)
        for name, value in headers.items()
        if name in _PASSED_ON or name.startswith(b"flwr-")
    ]


class Signatures:
    """Lets each signature pass once.

    Those of before its own start do not pass either: it cannot know whether they were used.
    """

    def __init__(self, capacity: int = _SIGNATURES) -> None:
        self._capacity = capacity
        self._start = time.time()
        self._used: dict[int, float] = {}  # a signature's r -> when it was used, in this order

    def claim(self, headers: Mapping[bytes, bytes]) -> int:
        """Returns what identifies the signature among `headers`, which from now on is used.

        An ECDSA signature is a pair (r, s). Whoever saw it can write it in other ways, and negate s
        without making it invalid, but without the key they cannot make one of another r.

        Raises:
            Refusal: there is none, it is too old or too new, or it was used.
        """
        now = time.time()
        try:
            signed_at = datetime.fromisoformat(headers[_TIMESTAMP].decode("ascii")).timestamp()
            r, _ = decode_dss_signature(b64decode(headers[_SIGNATURE], validate=True))
            headers[_PUBLIC_KEY]
        except KeyError as error:
            raise Refusal(401, f"no {error.args[0].decode()}") from error
        except ValueError as error:
            raise Refusal(401, "malformed signature") from error
        if not -_NEWEST_SECONDS < now - signed_at < _OLDEST_SECONDS:
            raise Refusal(401, "signature outside its time")
        if signed_at < self._start:
            raise Refusal(503, "signed before the gate's start; sign anew")
        self._forget(now)
        if r in self._used:
            raise Refusal(401, "signature used before")
        if len(self._used) >= self._capacity:
            raise Refusal(503, "too many signatures at once; try later")
        self._used[r] = now
        return r

    def release(self, signature: int) -> None:
        """Forgets a signature that the SuperLink did not accept, so that strangers fill nothing."""
        self._used.pop(signature, None)

    def _forget(self, now: float) -> None:
        """Drops those whose time is over: used when at most so much ahead of the clock."""
        while self._used:
            first = next(iter(self._used))
            if now - self._used[first] < _OLDEST_SECONDS + _NEWEST_SECONDS:
                break
            del self._used[first]
