"""Which requests pass the gate, and each signature once."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import h11
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedsim.federation.network.admission import (
    BODY_LIMIT,
    REPLIES,
    Refusal,
    Signatures,
    check_replies,
    select_headers,
    vet,
)

ORDER_P384 = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffff"
    "c7634d81f4372ddf581a0db248b0a77aecec196accc52973",
    16,
)
"""How many points the curve has: negating s modulo it keeps a signature valid."""
KEY = ec.generate_private_key(ec.SECP384R1())


def signed(
    key: ec.EllipticCurvePrivateKey = KEY, age: float = 0.0, length: int = 0
) -> dict[bytes, bytes]:
    timestamp = (datetime.now(UTC) - timedelta(seconds=age)).isoformat().encode()
    signature = key.sign(timestamp, ec.ECDSA(hashes.SHA256()))
    return {
        b"flwr-public-key": b64encode(public_key_to_bytes(key.public_key())),
        b"flwr-timestamp": timestamp,
        b"flwr-signature": b64encode(signature),
        b"content-length": str(length).encode(),
    }


def status(signatures: Signatures, headers: dict[bytes, bytes]) -> int:
    try:
        signatures.settle(signatures.claim(headers), is_accepted=True)
    except Refusal as refusal:
        return refusal.status
    return 200


def request(
    target: bytes = b"/v1/fleet/pull-messages",
    method: bytes = b"POST",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> h11.Request:
    default = [(b"content-length", b"0")]
    host = [(b"host", b"x")]
    given = default if headers is None else headers
    return h11.Request(method=method, target=target, headers=[*host, *given])


def refused(asked: h11.Request) -> int:
    with pytest.raises(Refusal) as raised:
        vet(asked, BODY_LIMIT)
    return raised.value.status


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"/v1/control/start-run",
        b"/v1/runtime/acquire-task",
        b"/v1/fleet/",
        b"/v1/fleet/../control/start-run",
        b"/v1/fleet/%2e%2e/control/start-run",
        b"/v1/fleet%2fpull-messages",
        b"//v1/fleet/pull-messages",
        b"/v1/fleet/pull-messages/",
        b"/v1/fleet/pull-messages?x",
        b"/v1/fleet/pull-messages;x",
        b"/v1/fleet/pull-messages#x",
        b"/V1/FLEET/PULL-MESSAGES",
        b"https://superlink:8000/v1/fleet/pull-messages",
        b"*",
    ],
)
def test_nothing_but_a_plain_path_of_the_fleet_api_passes(target: bytes) -> None:
    assert refused(request(target)) == 404


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"OPTIONS", b"TRACE", b"HEAD", b"post"])
def test_nothing_but_post_passes(method: bytes) -> None:
    assert refused(request(method=method)) == 405


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], 411),
        ([(b"transfer-encoding", b"chunked")], 411),
        ([(b"content-length", b"5"), (b"transfer-encoding", b"chunked")], 411),
        ([(b"content-length", str(BODY_LIMIT + 1).encode())], 413),
        ([(b"content-length", b"0"), (b"upgrade", b"h2c")], 400),
        ([(b"content-length", b"0"), (b"flwr-signature", b"a"), (b"Flwr-Signature", b"b")], 400),
    ],
)
def test_headers_that_do_not_pass(headers: list[tuple[bytes, bytes]], expected: int) -> None:
    assert refused(request(headers=headers)) == expected


def test_an_announcement_of_replies_is_small() -> None:
    length = [(b"content-length", str(17 * 2**20).encode())]
    assert refused(request(REPLIES, headers=length)) == 413
    assert vet(request(b"/v1/fleet/push-object", headers=length), BODY_LIMIT)


def test_the_superlink_sees_few_headers() -> None:
    given = [(b"content-length", b"3"), (b"flwr-timestamp", b"t"), (b"x-forwarded-for", b"y")]
    headers = vet(request(headers=[*given, (b"cookie", b"z")]), BODY_LIMIT)
    assert dict(select_headers(headers)) == {b"content-length": b"3", b"flwr-timestamp": b"t"}


def test_a_signature_passes_once_however_it_is_written() -> None:
    signatures, headers = Signatures(since=0), signed()
    assert status(signatures, headers) == 200
    assert status(signatures, headers) == 401
    r, s = decode_dss_signature(b64decode(headers[b"flwr-signature"]))
    negated = b64encode(encode_dss_signature(r, ORDER_P384 - s))
    assert negated != headers[b"flwr-signature"]
    KEY.public_key().verify(
        b64decode(negated), headers[b"flwr-timestamp"], ec.ECDSA(hashes.SHA256())
    )
    assert status(signatures, headers | {b"flwr-signature": negated}) == 401


def test_two_signatures_of_one_moment_both_pass() -> None:
    signatures, headers = Signatures(since=0), signed()
    again = KEY.sign(headers[b"flwr-timestamp"], ec.ECDSA(hashes.SHA256()))
    assert status(signatures, headers) == 200
    assert status(signatures, headers | {b"flwr-signature": b64encode(again)}) == 200


def test_a_signature_outside_its_time_does_not_pass() -> None:
    for age in (305.0, 86400.0, -6.0):
        assert status(Signatures(since=0), signed(age=age)) == 401
    assert status(Signatures(since=time.time() - 5), signed(age=10)) == 503


def test_a_signature_is_remembered_while_it_is_valid_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signatures, headers, start = Signatures(since=0), signed(age=-4), time.time()
    assert status(signatures, headers) == 200
    for later in (100, 300, 308):
        monkeypatch.setattr(time, "time", lambda later=later: start + later)
        assert status(signatures, headers) == 401
    monkeypatch.setattr(time, "time", lambda: start + 311)
    signatures.claim(signed(age=-311))
    assert len(signatures._used) == 1


@pytest.mark.parametrize(
    "change",
    [
        {b"flwr-timestamp": b"2026-11-25T00:00:00+00:00"},
        {b"flwr-timestamp": b"0001-01-01T00:00:00+23:59"},
        {b"flwr-timestamp": b"\xff"},
        {b"flwr-signature": b"AAAA"},
        {b"flwr-signature": b"not base64"},
        {b"flwr-public-key": b64encode(b"no key")},
        {
            b"flwr-public-key": b64encode(
                public_key_to_bytes(ec.generate_private_key(ec.SECP384R1()).public_key())
            )
        },
    ],
)
def test_an_invalid_signature_does_not_pass(change: dict[bytes, bytes]) -> None:
    assert status(Signatures(since=0), signed() | change) == 401


def test_an_unsigned_request_does_not_pass() -> None:
    for name in (b"flwr-public-key", b"flwr-timestamp", b"flwr-signature"):
        headers = signed()
        del headers[name]
        assert status(Signatures(since=0), headers) == 401


def test_a_large_body_passes_once_its_key_was_accepted() -> None:
    signatures = Signatures(since=0)
    assert status(signatures, signed(length=10**9)) == 503
    assert status(signatures, signed()) == 200
    assert status(signatures, signed(length=10**9)) == 200


def test_signatures_of_strangers_leave_nothing_behind_and_all_others_stay_used() -> None:
    signatures, headers = Signatures(since=0), signed()
    signatures.settle(signatures.claim(signed()), is_accepted=False)
    assert not signatures._used and not signatures._accepted
    assert status(signatures, signed()) == 200
    signatures.settle(signatures.claim(headers), is_accepted=False)
    assert status(signatures, headers) == 401
    signatures = Signatures(since=0, capacity=2)
    assert [status(signatures, signed()) for _ in range(3)] == [200, 200, 503]


def announcement(**change: object) -> bytes:
    own = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "a"}
    metadata = Metadata(**(own | change))
    return PushMessagesRequest(
        node=Node(node_id=7), messages_list=[Message(metadata=metadata)]
    ).SerializeToString()


@pytest.mark.parametrize(
    "body",
    [
        announcement(src_node_id=8),
        announcement(src_node_id=1),
        announcement(dst_node_id=8),
        announcement(reply_to_message_id=""),
        announcement() + announcement(src_node_id=8),
        b"\xff",
    ],
)
def test_a_node_cannot_speak_for_others(body: bytes) -> None:
    check_replies(announcement())
    with pytest.raises(Refusal) as raised:
        check_replies(body)
    assert raised.value.status == 400


def test_announcements_are_held_up_to_a_limit_of_each_node_and_of_all() -> None:
    signatures = Signatures(0)
    size = 15 * 2**20

    def hold(key: bytes, size: int = size) -> None:
        held.enter_context(signatures.holding(key, size))

    with ExitStack() as held:
        hold(b"0")
        with pytest.raises(Refusal, match="later"):
            hold(b"0")
        for key in (b"1", b"2", b"3"):
            hold(key)
        with pytest.raises(Refusal, match="later"):
            hold(b"4")
        hold(b"4", 1000)
    with ExitStack() as held:
        hold(b"0")
