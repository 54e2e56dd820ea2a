"""The gate in its own process, before a server that counts what it is sent."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import ssl
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from network_support import NEVER, Authority, gate, make_authority, until

from fedsim.federation.network import gate as gate_module
from fedsim.federation.network import link, passage, superlink
from fedsim.federation.network.superlink import Child, free_port
from fedsim.types import FedsimError

KEY = ec.generate_private_key(ec.SECP384R1())
PATH = "/v1/fleet/push-object"
MEGABYTE = 2**20


class Inside(BaseHTTPRequestHandler):
    """Answers what it was sent; the path says how."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []  # noqa: RUF012 - of all requests

    def do_POST(self) -> None:
        self.asked.append(self.path)
        left = int(self.headers["content-length"])
        size = 0
        while left and (data := self.rfile.read(min(left, MEGABYTE))):
            left -= len(data)
            size += len(data)
        if self.path.endswith("/break"):
            self.close_connection = True
            return
        headers = [list(pair) for pair in self.headers.items()]
        answer = json.dumps({"path": self.path, "size": size, "headers": headers}).encode()
        if self.path.endswith("/large"):
            answer = bytes(32 * MEGABYTE)
        self.send_response(401 if self.path.endswith("/stranger") else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.send_header("set-cookie", "secret")
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        # A gate may break off. A traceback that a thread prints then makes ast.parse fail
        # elsewhere in this process (CPython 3.11: "AST constructor recursion depth mismatch").
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("keys") / "keys", ["127.0.0.1"])


@pytest.fixture(scope="module")
def inside(authority: Authority) -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Inside)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.server_certificate, authority.server_key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def served(authority: Authority, superlink: str, log: io.StringIO) -> gate_module._Server:
    settings = gate_module._GateSettings(
        superlink=superlink,
        certificate=authority.server_certificate,
        key=authority.server_key,
        roots=authority.certificate,
        body_limit=10**6,
        connections=16,
    )
    return gate_module._Server(settings, 0, logging.StreamHandler(log))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "gate.log"


@pytest.fixture(scope="module")
def process(authority: Authority, inside: str, log: Path) -> Iterator[tuple[str, Child]]:
    with gate(authority, inside, log) as running:
        yield running


@pytest.fixture(scope="module")
def address(process: tuple[str, Child]) -> str:
    return process[0]


@pytest.fixture
def fresh(authority: Authority, inside: str, tmp_path: Path) -> Iterator[Fresh]:
    """A gate of its own, whose log has no line of another test."""
    log = tmp_path / "fresh.log"
    with gate(authority, inside, log, connections=16) as (address, _), ExitStack() as clients:
        yield Fresh(address, log, lambda: clients.enter_context(calling(authority, address)))


@dataclass(frozen=True)
class Fresh:
    address: str
    log: Path
    connect: Callable[[], httpx.Client]


@pytest.fixture
def client(authority: Authority, address: str) -> Iterator[httpx.Client]:
    with calling(authority, address) as client:
        yield client


def calling(authority: Authority, address: str) -> httpx.Client:
    context = ssl.create_default_context(cafile=authority.certificate)
    return httpx.Client(verify=context, base_url=f"https://{address}", timeout=NEVER)


def sign() -> dict[str, str]:
    timestamp = datetime.now(UTC).isoformat()
    signature = KEY.sign(timestamp.encode(), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(KEY.public_key())).decode(),
        "flwr-timestamp": timestamp,
        "flwr-signature": b64encode(signature).decode(),
    }


def connected(authority: Authority, address: str) -> ssl.SSLSocket:
    """A connection of somebody who has the authority's certificate, and no key."""
    context = ssl.create_default_context(cafile=authority.certificate)
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), NEVER)
    return context.wrap_socket(plain, server_hostname=host)


def raw(authority: Authority, address: str, *parts: bytes) -> bytes:
    """What the gate answers to bytes that no library would send."""
    with connected(authority, address) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


def memory(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_a_signed_request_passes_with_few_of_its_headers(client: httpx.Client, inside: str) -> None:
    answer = client.post(PATH, content=b"abc", headers=sign() | {"cookie": "a", "host": "evil/x?"})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    got = answer.json()
    assert (got["path"], got["size"]) == (PATH, 3)
    names = [name.lower() for name, _ in got["headers"]]
    assert sorted(names) == sorted(["host", "content-length", "accept", *sign()])
    assert dict(got["headers"])["Host" if "Host" in dict(got["headers"]) else "host"] == inside
    assert client.post(PATH, content=b"abc", headers=sign()).status_code == 200
    assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]


def test_refusals_say_why_in_one_line_of_the_log(fresh: Fresh) -> None:
    client, asked = fresh.connect(), len(Inside.asked)
    assert client.post("/v1/control/start-run", headers=sign()).status_code == 404
    assert client.get(PATH).status_code == 405
    assert client.post(PATH, headers={}).status_code == 401
    lines = fresh.log.read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "404 not the Fleet API: POST /v1/control/start-run",
        f"405 not POST: GET {PATH}",
        f"401 no flwr-public-key: POST {PATH}",
    ]
    assert len(Inside.asked) == asked


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("CONNECT 127.0.0.1:8000 HTTP/1.1", "Host: a"), 404),
        (head("TRACE /v1/fleet/x HTTP/1.1", "Host: a"), 405),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", "Host: b", "Content-Length: 0"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Content-Length: 0"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: 3", "Content-Length: 4"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", f"Content-Length: {'9' * 5000}"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length : 5"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: +5"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: 5", " folded: x"), 400),
        (head(f"POST {PATH} HTTP/1.1", "Host: a", f"X: {'y' * 40_000}"), 431),
        (head(f"POST /v1/fleet/{'y' * 40_000} HTTP/1.1", "Host: a"), 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
        (head(f"POST {PATH}\n HTTP/1.1", "Host: a"), 400),
    ],
)
def test_what_no_library_sends_does_not_pass(
    authority: Authority, address: str, request_head: bytes, status: int
) -> None:
    asked = len(Inside.asked)
    answer = raw(authority, address, request_head)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in answer.lower()
    assert len(Inside.asked) == asked


def test_what_follows_a_refused_request_is_not_answered(authority: Authority, address: str) -> None:
    first = head(
        f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: 5", "Transfer-Encoding: chunked"
    )
    lines = [f"{name}: {value}" for name, value in sign().items()]
    hidden = head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: 0", *lines)
    assert raw(authority, address, first + b"0\r\n\r\n" + hidden).count(b"HTTP/1.1 ") == 1


def test_a_line_of_the_log_cannot_be_forged(authority: Authority, address: str, log: Path) -> None:
    raw(authority, address, b"POST /\xe2\x80\xa8\x1b[2K HTTP/1.1\r\nHost: a\r\n\r\n")
    assert log.read_text().isascii()
    assert "\x1b" not in log.read_text()


def test_the_log_of_a_program_begins_anew_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(superlink, "_LOG_BYTES", 50_000)
    monkeypatch.setattr(superlink, "_FIRST_BYTES", 50)
    path = tmp_path / "node.log"
    talk = "print('SuperNode ID: 7')\nwhile True: print('word' * 100, flush=True)"
    child = Child([sys.executable, "-c", talk], path)
    try:
        for _ in range(3):
            until(lambda: path.stat().st_size > 50_000, "a full log")
            child.bound_log()
            until(lambda: "word" in child.words(), "words in the new one")
    finally:
        child.stop()
    for text in (path.read_text(), path.with_name("node.log.1").read_text()):
        assert text.startswith("SuperNode ID: 7\n") and "word" in text
        assert "\0" not in text


def test_a_full_log_of_the_gate_begins_anew_beside_the_older_part(
    authority: Authority, inside: str, tmp_path: Path
) -> None:
    log = tmp_path / "gate.log"
    log.write_bytes(bytes(8 * MEGABYTE))
    with gate(authority, inside, log) as (address, _), calling(authority, address) as client:
        assert client.get("/").status_code == 404
        until(lambda: log.exists() and " 404 " in log.read_text(), "a line")
    assert log.stat().st_size < 1000
    assert log.with_name("gate.log.1").stat().st_size == 8 * MEGABYTE


def test_a_full_disk_does_not_close_the_gate(authority: Authority, inside: str) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    served(authority, inside, Full())._log_refusal(
        gate_module._Caller("-"), gate_module.Refusal(503, "too many connections"), ""
    )


def test_who_only_connects_leaves_no_line(
    authority: Authority, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_REACH_SECONDS", NEVER)
    for _ in range(3):
        link.check(fresh.address, authority.certificate)
    with socket.create_connection(("127.0.0.1", int(fresh.address.rpartition(":")[2]))) as plain:
        plain.sendall(b"nothing of TLS")  # after which a line comes
        until(fresh.log.read_text, "a line")
    assert "broke off" not in fresh.log.read_text()


def test_a_clock_that_is_off_is_told_to_its_node(
    authority: Authority, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_REACH_SECONDS", NEVER)
    began = time.time()
    for off, told in ((0, ""), (-200, ""), (400, "ahead"), (-4000, "behind")):
        monkeypatch.setattr(link.time, "time", lambda off=off: began + off)
        said = link.clock_error(address, authority.certificate)
        assert told in said and bool(told) == bool(said)
    assert link.clock_error(f"127.0.0.1:{free_port()}", authority.certificate) == ""


def test_plaintext_does_not_pass(address: str, log: Path) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://{address}{PATH}", headers=sign(), timeout=NEVER)
    until(lambda: " 400 no TLS: " in log.read_text(), "a line")


def test_large_bodies_stream_both_ways(client: httpx.Client, process: tuple[str, Child]) -> None:
    assert client.post(PATH, content=b"abc", headers=sign()).status_code == 200
    before = memory(process[1].pid)
    size = 60 * MEGABYTE
    body = (bytes(MEGABYTE) for _ in range(60))
    headers = sign() | {"content-length": str(size)}
    assert client.post(PATH, content=body, headers=headers).json()["size"] == size
    large = client.post("/v1/fleet/large", content=b"", headers=sign())
    assert large.content == bytes(32 * MEGABYTE)
    assert memory(process[1].pid) - before < 20 * MEGABYTE


def test_a_body_over_the_limit_is_refused_before_it_is_sent(
    authority: Authority, inside: str, tmp_path: Path
) -> None:
    with (
        gate(authority, inside, tmp_path / "log", **{"body-limit": 1000}) as (address, _),
        calling(authority, address) as client,
    ):
        assert client.post(PATH, content=bytes(1000), headers=sign()).status_code == 200
        assert client.post(PATH, content=bytes(1001), headers=sign()).status_code == 413


def test_strangers_hold_no_place_of_a_node(authority: Authority, fresh: Fresh) -> None:
    node = fresh.connect()
    for _ in range(2):  # the second request is of a key that the SuperLink has accepted
        assert node.post(PATH, content=b"abc", headers=sign()).status_code == 200
    (own,) = node._transport._pool.connections  # type: ignore[attr-defined]
    strangers = [connected(authority, fresh.address) for _ in range(40)]
    assert node.post(PATH, content=b"abc", headers=sign()).status_code == 200
    assert node._transport._pool.connections == [own], "the same as before"  # type: ignore[attr-defined]
    assert fresh.connect().post(PATH, content=b"abc", headers=sign()).status_code == 200
    for stranger in strangers[:30]:
        with pytest.raises(OSError, match=r"reset|EOF"), stranger:
            assert not stranger.recv(1)
            raise ConnectionResetError("reset, after its last words")
    for stranger in strangers[30:]:
        stranger.close()
    assert " 503 too many connections" in fresh.log.read_text()


def test_one_node_has_a_share_of_the_connections(fresh: Fresh) -> None:
    def again(client: httpx.Client) -> int:
        statuses = [client.post(PATH, content=b"", headers=sign()).status_code for _ in range(2)]
        return statuses[1]

    first, second = fresh.connect(), fresh.connect()
    assert (again(first), again(second)) == (200, 200)
    assert again(fresh.connect()) == 503
    first.close()
    until(lambda: again(fresh.connect()) == 200, "a free place")


def test_announcements_of_one_node_are_not_all_held(authority: Authority, fresh: Fresh) -> None:
    node = fresh.connect()
    assert node.post(PATH, content=b"", headers=sign()).status_code == 200
    target = "POST /v1/fleet/push-messages HTTP/1.1"

    def begun(size: int) -> bytes:
        lines = [f"{name}: {value}" for name, value in sign().items()]
        return head(target, "Host: a", f"Content-Length: {size}", *lines) + b"x"

    with connected(authority, fresh.address) as slow:
        slow.sendall(begun(10 * MEGABYTE))
        until(
            lambda: raw(authority, fresh.address, begun(10 * MEGABYTE)).startswith(b"HTTP/1.1 503"),
            "a refusal of the second",
        )
    until(
        lambda: (
            node.post("/v1/fleet/push-messages", content=b"\xff", headers=sign()).status_code == 400
        ),
        "a place for another",
    )


def test_nobody_washes_the_log_away(
    authority: Authority, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, refusal = io.StringIO(), gate_module.Refusal(404, "not the Fleet API")
    server = served(authority, inside, log)
    node, other = (gate_module._Caller("1.2.3.4:5", key) for key in (b"key", b"other"))
    server._log_refusal(node, refusal, "first")
    for number in range(20_000):
        address = f"10.0.{number % 7_000 // 200}.{number % 200}"
        stranger = gate_module._Caller(f"{address}:1", gate_module._network(address))
        server._log_refusal(stranger, refusal, "noise")
    server._log_refusal(node, refusal, "second")
    for _ in range(1000):
        server._log_refusal(other, refusal, "noise")
    server._log_refusal(node, refusal, "third")
    lines = log.getvalue().splitlines()
    told = [line.split()[-1] for line in lines if "1.2.3.4:5 " in line and "noise" not in line]
    assert told == ["first", "second", "third"]
    assert len(lines) < 3000
    now = time.monotonic() + gate_module._LINES_SECONDS
    monkeypatch.setattr(gate_module.time, "monotonic", lambda: now)
    server._log_refusal(node, refusal, "later")
    assert str(21_000 + 3 - len(lines)) in log.getvalue().splitlines()[-2]


def test_a_machine_with_ipv6_is_one_party() -> None:
    one, same, other = map(gate_module._network, ("fd00::1%eth0", "fd00::2", "fd00:0:0:1::1"))
    assert one == same != other


@pytest.mark.parametrize("is_there", [False, True])
def test_a_superlink_that_is_gone_or_anothers_gets_nothing(
    is_there: bool, authority: Authority, inside: str, tmp_path: Path
) -> None:
    """The node may try again: the answer is 502."""
    superlink = inside if is_there else f"127.0.0.1:{free_port()}"
    other = make_authority(tmp_path / "other", ["127.0.0.1"])
    asked = len(Inside.asked)
    trusting = gate(authority, superlink, tmp_path / "log", roots=other.certificate)
    with trusting as (address, running), calling(authority, address) as client:
        assert client.post(PATH, headers=sign()).status_code == 502
        assert running.status is None
    assert len(Inside.asked) == asked


def test_what_cannot_start_says_why(authority: Authority, inside: str, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other", ["127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        for changes, said in (({"listen": there}, "in use"), ({"key": other.server_key}, "mism")):
            refused = gate(authority, inside, tmp_path / "gate.log", **changes)
            with pytest.raises(FedsimError, match="the gate does not start") as error, refused:
                pass
            assert said in str(error.value)


def test_without_a_file_refusals_go_to_standard_error(
    authority: Authority, inside: str, tmp_path: Path
) -> None:
    with gate(authority, inside, tmp_path / "log", log=None) as (address, running):
        with calling(authority, address) as client:
            assert client.get("/").status_code == 404
        until(lambda: " 404 not the Fleet API: GET /\n" in running.words(), "a line")
        running._process.terminate()
        assert running._process.wait(NEVER) == 0


class Waits:
    """The gate's `asyncio`, whose timeouts end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, asyncio.Timeout]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def timeout(self, seconds: float) -> asyncio.Timeout:
        never = asyncio.timeout(None)
        self.begun.append((seconds, never))
        return never

    async def end(self, seconds: float) -> None:
        """Ends the last wait of about so many seconds, once there is one."""
        while not (found := [wait for asked, wait in self.begun if abs(asked - seconds) < 5]):
            await asyncio.sleep(0.01)
        for _ in range(9):  # until it waits for more
            await asyncio.sleep(0)
        found[-1].reschedule(0)


@pytest.mark.parametrize(
    ("limit", "is_whole", "reason"),
    [("_HEAD_SECONDS", False, "408 headers too slow"), ("_GRACE_SECONDS", True, "408 too slow")],
)
def test_slow_clients_are_cut_off(
    authority: Authority,
    inside: str,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    is_whole: bool,
    reason: str,
) -> None:
    lines = [f"{name}: {value}" for name, value in sign().items()]
    sent = head(f"POST {PATH} HTTP/1.1", "Host: a", "Content-Length: 99", *lines)
    sent = sent + b"x" if is_whole else sent[:-2]
    log, waits, received = io.StringIO(), Waits(), bytearray()
    receive = h11.Connection.receive_data

    def watched(self: h11.Connection, data: bytes) -> None:
        if self.our_role is h11.SERVER:
            received.extend(data)
        receive(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", watched)
    monkeypatch.setattr(passage, "asyncio", waits)

    async def talk() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = served(authority, inside, log)
        task = asyncio.create_task(server.run(listener))
        context = ssl.create_default_context(cafile=authority.certificate)
        port = listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(sent)
        while received != sent:
            await asyncio.sleep(0.01)
        await waits.end(getattr(passage, limit))
        answer = await asyncio.wait_for(reader.read(), NEVER)
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()
        task.cancel()
        listener.close()

    asyncio.run(talk())
    assert f" {reason}: " in log.getvalue()
