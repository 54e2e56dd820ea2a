"""A gate in front of a SuperLink: nodes reach its Fleet API, and nothing else on that port.

A SuperLink serves three APIs on one port, and authenticates nodes on one of them: whoever reaches
the port can start runs on the other two. The gate ends a node's TLS, passes on what `admission`
lets pass (`POST /v1/fleet/...`) in a request of its own making, over TLS of its own, and refuses
all else with a line in its log. Bodies stream through it.

    python -m fedsim.federation.network.gate --listen 0.0.0.0:9000 --superlink superlink:8000
        --certificate server.crt --key server.key --roots ca.crt

Its process is kept small (torch is not imported), since it stands where strangers can reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import h11

from fedsim.federation.network import addresses
from fedsim.federation.network.admission import (
    BODY_LIMIT,
    REPLIES,
    Refusal,
    Signatures,
    check_replies,
    passed_on,
    vet,
)
from fedsim.system import processes

CONNECTIONS = 1024
"""So many nodes' connections at once; a node has two, and one for each core while it pushes."""

_CHUNK_BYTES = 64 * 1024
"""Of a body, so much is held at once."""
_HEAD_BYTES = 16 * 1024
"""Limit of a request's line and headers; a node's are 1 kB."""
_HANDSHAKE_SECONDS = 10.0
_HEAD_SECONDS = 15.0
"""From a connection's first byte (or last answer) to the end of a request's headers."""
_GRACE_SECONDS = 30.0
_SLOWEST = 16 * 1024
"""A client may keep the gate waiting for the grace, and a second for so many bytes it moved."""
_ANSWER_SECONDS = 120.0
"""The SuperLink may keep a node waiting for so long."""
_CONNECT_SECONDS = 10.0
_REUSE_SECONDS = 2.0
"""An idle connection to the SuperLink is used again within these; it closes its end after 5."""
_LINGER_SECONDS = 1.0
"""A refused client may send on for so long: if it were cut off, it would not read why."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Describes a gate: whom it passes requests to, and who it is."""

    superlink: str
    """HOST:PORT, its host as in its certificate."""
    certificate: Path
    key: Path
    roots: Path
    """The authority that vouches for the SuperLink."""
    body_limit: int = BODY_LIMIT
    connections: int = CONNECTIONS


class Gate:
    """A gate in a process of its own, which ends with the block and with this process.

    `address` is the HOST:PORT that it listens at (port 0 takes a free one). Its log has a line for
    each refusal: time, client, status, reason, request.
    """

    def __init__(self, listen: str, settings: Settings, *, log: Path | None = None) -> None:
        self._listen, self._settings, self._log = listen, settings, log
        self._stack = ExitStack()

    def __enter__(self) -> Gate:
        """Listens, then starts the process; clients may connect from here on.

        Raises:
            FedsimError: the address is taken, or a certificate or key cannot be used.
        """
        from fedsim.types import FedsimError  # which imports torch: not for the gate's process

        try:
            _contexts(self._settings)
            server, since = addresses.listener(self._listen), time.time()
        except (OSError, ValueError) as error:
            raise FedsimError(
                f"the gate at {self._listen} cannot start: {error}; name a free address, and a "
                "certificate, key and authority that belong together"
            ) from error
        with server:
            self.address = addresses.address_of(server)
            arguments = (server, since, self._settings, self._log)
            self._process = self._stack.enter_context(processes.child(_in_child, *arguments))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def is_running(self) -> bool:
        """Whether its process is still there."""
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        """The identifier of its process."""
        assert self._process.pid is not None
        return self._process.pid


class _Side:
    """One of the two connections of an exchange, and where its HTTP stands."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        role: type[h11.CLIENT] | type[h11.SERVER],
    ) -> None:
        self._reader, self._writer = reader, writer
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_BYTES)

    async def event(self, chunk: int = _CHUNK_BYTES) -> Any:
        """The next event of the other end, from reads of at most `chunk` bytes."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self._reader.read(chunk))
        return event

    async def send(self, event: h11.Event) -> None:
        self._writer.write(self.http.send(event) or b"")
        await self._writer.drain()

    async def discard(self) -> None:
        """Reads the rest of a request's body, for nobody."""
        while self.http.their_state is h11.SEND_BODY:
            await self.event()

    async def close(self) -> None:
        with suppress(OSError, TimeoutError):
            self._writer.close()
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._writer.wait_closed()
        self._writer.transport.abort()


class _Patience:
    """How long the gate still waits for a client, for all waits of one exchange together."""

    def __init__(self) -> None:
        self._left = _GRACE_SECONDS

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Raises a Refusal when it is exhausted."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await awaitable
        except TimeoutError as error:
            raise Refusal(408, "too slow") from error
        finally:
            self._left -= time.monotonic() - start

    def renew(self, size: int) -> None:
        """Adds to it for so many bytes that were moved."""
        self._left += size / _SLOWEST


class _Passage:
    """One client's connection, and the connection to the SuperLink that serves it."""

    def __init__(self, client: _Side, server: _Server) -> None:
        self.client, self._server = client, server
        self.request = ""
        """What is asked, for the log."""
        self.is_answered = False
        """Whether an answer has begun, so that no other can be given."""
        self._superlink: _Side | None = None
        self._idle_since = 0.0

    async def exchange(self) -> bool:
        """Serves one request. Returns whether there can be another.

        Raises:
            Refusal: it does not pass, or cannot be answered.
        """
        self.request, self.is_answered = "", False
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                request = await self.client.event(_HEAD_BYTES)
        except TimeoutError as error:
            if self.client.http.trailing_data[0]:
                raise Refusal(408, "headers too slow") from error
            return False
        if not isinstance(request, h11.Request):
            return False
        self.request = f"{ascii(request.method)[2:-1]} {ascii(request.target)[2:-1]}"[:200]
        headers = vet(request, self._server.settings.body_limit)
        signature = self._server.signatures.claim(headers)
        patience, is_accepted = _Patience(), False
        try:
            superlink = await self._connected()
            await self._forward(superlink, request.target, headers, patience)
            is_accepted = await self._answer(superlink, patience)
        finally:
            self._server.signatures.settle(signature, is_accepted=is_accepted)
        if h11.MUST_CLOSE in (self.client.http.our_state, self.client.http.their_state):
            return False
        self.client.http.start_next_cycle()
        return True

    async def close(self) -> None:
        await self.client.close()
        if self._superlink:
            await self._superlink.close()

    async def _forward(
        self, superlink: _Side, target: bytes, headers: dict[bytes, bytes], patience: _Patience
    ) -> None:
        """Sends the request on, its body as it comes."""
        host = (b"host", self._server.settings.superlink.encode())
        head = h11.Request(method=b"POST", target=target, headers=[host, *passed_on(headers)])
        await _of_superlink(superlink.send(head))
        body = self._body(patience)
        async for data in _checked(body) if target == REPLIES else body:
            await _of_superlink(superlink.send(h11.Data(data=data)))
        await _of_superlink(superlink.send(h11.EndOfMessage()))

    async def _body(self, patience: _Patience) -> AsyncIterator[bytes]:
        """The client's body as it comes."""
        while isinstance(data := await patience.wait(self.client.event()), h11.Data):
            patience.renew(len(data.data))
            yield data.data
        if not isinstance(data, h11.EndOfMessage):
            raise Refusal(400, "body cut off")

    async def _answer(self, superlink: _Side, patience: _Patience) -> bool:
        """Hands the SuperLink's answer to the client and returns whether it accepted."""
        response = await _of_superlink(superlink.event())
        if not isinstance(response, h11.Response):
            raise Refusal(502, "the SuperLink did not answer")
        kept = [h for h in response.headers if h[0] in (b"content-type", b"content-length")]
        self.is_answered = True
        head = h11.Response(status_code=response.status_code, headers=kept)
        await patience.wait(self.client.send(head))
        while isinstance(data := await _of_superlink(superlink.event()), h11.Data):
            patience.renew(len(data.data))
            await patience.wait(self.client.send(data))
        if not isinstance(data, h11.EndOfMessage):
            raise Refusal(502, "the SuperLink's answer was cut off")
        await patience.wait(self.client.send(h11.EndOfMessage()))
        self._idle_since = time.monotonic()
        return response.status_code == 200

    async def _connected(self) -> _Side:
        """A connection to the SuperLink: the last one, or a new one if it may be about to close."""
        if self._superlink:
            http, idle = self._superlink.http, time.monotonic() - self._idle_since
            if http.our_state is http.their_state is h11.DONE and idle < _REUSE_SECONDS:
                http.start_next_cycle()
                return self._superlink
            await self._superlink.close()
        self._superlink = await self._server.connect()
        return self._superlink


async def _checked(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Holds an announcement of replies until all of it was checked."""
    whole = b"".join([data async for data in body])
    check_replies(whole)
    yield whole


async def _of_superlink(awaitable: Awaitable[T]) -> T:
    """Waits for the SuperLink; what goes wrong there is not the client's doing."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await awaitable
    except TimeoutError as error:
        raise Refusal(504, "the SuperLink takes too long") from error
    except (OSError, h11.ProtocolError) as error:
        raise Refusal(502, f"the SuperLink broke off: {error}") from error


class _Server:
    """Accepts clients, and writes the log."""

    def __init__(self, settings: Settings, since: float, log: TextIO) -> None:
        self.settings, self._log = settings, log
        self.signatures = Signatures(since)
        self._inside, self._outside = _contexts(settings)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, server: socket.socket) -> None:
        """Serves until it is cancelled."""
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(server)
            except OSError as error:  # out of files, or the client has gone
                self._refused("-", Refusal(503, str(error)), "")
                await asyncio.sleep(0.1)
                continue
            who = f"{peer[0]}:{peer[1]}"
            if len(self._tasks) >= self.settings.connections:
                connection.close()
                self._refused(who, Refusal(503, "too many connections"), "")
                continue
            task = loop.create_task(self._serve(connection, who))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def connect(self) -> _Side:
        """Connects to the SuperLink.

        Raises:
            Refusal: it cannot be reached, or is not the one that the authority vouches for.
        """
        host, port = addresses.split(self.settings.superlink)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                streams = await asyncio.open_connection(host, port, ssl=self._inside)
        except (OSError, TimeoutError) as error:
            raise Refusal(502, f"the SuperLink cannot be reached: {error}") from error
        return _Side(*streams, h11.CLIENT)

    async def _serve(self, connection: socket.socket, who: str) -> None:
        """Serves one connection, from the handshake to its end."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._outside,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
        except OSError as error:  # of TLS, too; a probe that only connects is no request
            self._refused(who, Refusal(400, f"no TLS: {error}"), "")
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        passage = _Passage(_Side(reader, writer, h11.SERVER), self)
        try:
            while await passage.exchange():
                pass
        except Refusal as refusal:
            await self._refuse(passage, who, refusal)
        except h11.RemoteProtocolError as error:
            await self._refuse(passage, who, Refusal(error.error_status_hint, str(error)))
        except (OSError, h11.LocalProtocolError) as error:
            self._refused(who, Refusal(400, f"broke off: {error}"), passage.request)
        finally:
            await passage.close()

    async def _refuse(self, passage: _Passage, who: str, refusal: Refusal) -> None:
        """Tells the client, if an answer has not yet begun, and the log."""
        self._refused(who, refusal, passage.request)
        if passage.is_answered:
            return
        body = f"{refusal}\n".encode()
        headers = [("content-length", str(len(body))), ("content-type", "text/plain")]
        answer = h11.Response(
            status_code=refusal.status, headers=[*headers, ("connection", "close")]
        )
        with suppress(OSError, TimeoutError, h11.ProtocolError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await passage.client.send(answer)
                await passage.client.send(h11.Data(data=body))
                await passage.client.send(h11.EndOfMessage())
                await passage.client.discard()

    def _refused(self, who: str, refusal: Refusal, request: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        reason = ascii(str(refusal))[1:-1]
        print(
            f"{now} {who} {refusal.status} {reason}: {request or '-'}", file=self._log, flush=True
        )


def _in_child(server: socket.socket, since: float, settings: Settings, log: Path | None) -> None:
    with ExitStack() as stack:
        stream = stack.enter_context(log.open("a", encoding="utf-8")) if log else sys.stderr
        asyncio.run(_Server(settings, since, stream).run(server))


def _contexts(settings: Settings) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS towards the SuperLink, and towards clients."""
    outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outside.load_cert_chain(settings.certificate, settings.key)
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    inside.load_verify_locations(settings.roots)
    return inside, outside


async def _until_terminated(server: socket.socket, since: float, settings: Settings) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await _Server(settings, since, sys.stderr).run(server)


def main() -> None:
    """Runs a gate until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m fedsim.federation.network.gate")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    for name in ("--certificate", "--key", "--roots"):
        parser.add_argument(name, required=True, type=Path, metavar="FILE")
    parser.add_argument("--body-limit", type=int, default=BODY_LIMIT, metavar="BYTES")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, metavar="N")
    given = vars(parser.parse_args())
    listen = given.pop("listen")
    settings = Settings(**given)
    try:
        _contexts(settings)
        addresses.split(settings.superlink)
        server, since = addresses.listener(listen), time.time()
    except (OSError, ValueError) as error:
        parser.error(f"{error}; check address, certificate, key and roots")
    with server, suppress(asyncio.CancelledError):
        asyncio.run(_until_terminated(server, since, settings))


if __name__ == "__main__":
    main()
