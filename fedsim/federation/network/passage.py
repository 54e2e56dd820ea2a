"""Requests of one client on their way to the SuperLink, and the answers on their way back.

Each is made anew from what was read, so that both ends agree on where it begins and ends.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import h11

from fedsim.federation.network.admission import (
    REPLIES,
    Refusal,
    Signatures,
    check_replies,
    length,
    select_headers,
    vet,
)
from fedsim.system import addresses

CHUNK_BYTES = 64 * 1024
"""Maximum number of bytes of a body that are held in memory at once."""

# Limit of a request's line and headers; a node's are 1 kB.
_HEAD_BYTES = 16 * 1024
# Limit from a connection's first byte or last answer to the end of a request's headers.
_HEAD_SECONDS = 15.0
_GRACE_SECONDS = 30.0
# A client may keep the gate waiting for the grace, and a second for so many bytes it moved.
_SLOWEST = 16 * 1024
# The SuperLink may keep a node waiting for so long.
_ANSWER_SECONDS = 120.0
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 1.0
# An idle connection to the SuperLink is used again within these; it closes its end after 5.
_REUSE_SECONDS = 2.0

T = TypeVar("T")


class Side:
    """A connection to the client or to the SuperLink; `role` is what this process is on it.

    Reading and writing raise an OSError if the other end is gone, an h11.ProtocolError on bad HTTP.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        role: type[h11.CLIENT] | type[h11.SERVER],
    ) -> None:
        self._reader, self._writer = reader, writer
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_BYTES)

    async def event(self, chunk: int = CHUNK_BYTES) -> Any:
        """Returns the next h11 event from the other end, read by at most `chunk` bytes."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self._reader.read(chunk))
        return event

    async def send(self, event: h11.Event) -> None:
        """Sends one h11 event to the other end, and waits until that end can take more."""
        self._writer.write(self.http.send(event) or b"")
        await self._writer.drain()

    async def discard(self) -> None:
        """Reads the rest of a request's body and drops it."""
        while self.http.their_state is h11.SEND_BODY:
            await self.event()

    def abort(self) -> None:
        """Ends the connection at once; what is still to be sent is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection, and aborts it if the other end does not close within a second."""
        self._writer.close()
        limit = asyncio.timeout(_CLOSE_SECONDS)
        with suppress(OSError):  # the other end has gone, or does not say goodbye in time
            async with limit:
                await self._writer.wait_closed()
        if limit.expired():  # only then: Python 3.11.2 cannot abort what is closed
            self._writer.transport.abort()


@dataclass(frozen=True)
class SuperLink:
    """Address of the SuperLink, with the TLS settings that verify it (`context`)."""

    address: str
    """HOST:PORT; the SuperLink's certificate must name this host."""
    context: ssl.SSLContext

    async def connect(self) -> Side:
        """Connects to the SuperLink, and returns the connection; a Refusal (502) if that fails."""
        host, port = addresses.split(self.address)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                streams = await asyncio.open_connection(host, port, ssl=self.context)
        except (OSError, TimeoutError) as error:
            raise Refusal(502, f"the SuperLink cannot be reached: {error}") from error
        return Side(*streams, h11.CLIENT)


class _Patience:
    """Time for which the gate still waits for a client, over all waits of one exchange."""

    def __init__(self) -> None:
        self._left = _GRACE_SECONDS

    async def wait(self, awaitable: Awaitable[T]) -> T:
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                return await awaitable
        except TimeoutError as error:
            raise Refusal(408, "too slow") from error
        finally:
            self._left -= time.monotonic() - start

    def renew(self, size: int) -> None:
        self._left += size / _SLOWEST


class Passage:
    """Passes the requests of one client's connection on to the SuperLink, and its answers back."""

    def __init__(
        self,
        client: Side,
        superlink: SuperLink,
        signatures: Signatures,
        body_limit: int,
        on_node: Callable[[bytes], None],
    ) -> None:
        """Prepares to serve a connection of which nothing has been read.

        Args:
            client: The connection.
            superlink: The SuperLink behind the gate.
            signatures: Signatures that were used, on any connection.
            body_limit: Maximum size of a request's body in bytes.
            on_node: Called with the key (PEM) of a node that the SuperLink has let in before; it
                may refuse by a `Refusal`.
        """
        self.client, self._superlink = client, superlink
        self._signatures, self._body_limit, self._on_node = signatures, body_limit, on_node
        self.request = ""
        """Method and path of the request, escaped, for the log."""
        self.is_answered = False
        """Whether an answer has begun, so that no other can be given."""
        self._inner: Side | None = None
        self._idle_since = 0.0

    async def exchange(self) -> bool:
        """Serves one request; returns whether there can be another on this connection.

        A request that does not pass, or gets no answer, raises a `Refusal`. A client that breaks
        off or speaks no HTTP raises an OSError or an h11.ProtocolError.
        """
        self.request, self.is_answered = "", False
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                request = await self.client.event(_HEAD_BYTES)
        except TimeoutError as error:
            # Part of a request has come; without any, the connection is only idle.
            if self.client.http.trailing_data[0]:
                raise Refusal(408, "headers too slow") from error
            return False
        if not isinstance(request, h11.Request):
            return False
        self.request = f"{ascii(request.method)[2:-1]} {ascii(request.target)[2:-1]}"[:200]
        headers = vet(request, self._body_limit)
        signature = self._signatures.claim(headers)
        if self._signatures.is_node(signature.key):
            self._on_node(signature.key)
        patience, is_accepted = _Patience(), False
        try:
            inner = await self._reach_superlink()
            held = length(headers) if request.target == REPLIES else 0
            with self._signatures.holding(signature.key, held):
                await self._forward(inner, request.target, headers, patience)
            is_accepted = await self._answer(inner, patience)
        finally:
            self._signatures.settle(signature, is_accepted=is_accepted)
        if h11.MUST_CLOSE in (self.client.http.our_state, self.client.http.their_state):
            return False
        self.client.http.start_next_cycle()
        return True

    async def close(self, *, at_once: bool = False) -> None:
        """Closes both connections; `at_once` drops what is still to be sent."""
        for side in (self.client, self._inner):
            if side and at_once:
                side.abort()
            if side:
                await side.close()

    async def _forward(
        self, inner: Side, target: bytes, headers: dict[bytes, bytes], patience: _Patience
    ) -> None:
        host = (b"host", self._superlink.address.encode())
        head = h11.Request(method=b"POST", target=target, headers=[host, *select_headers(headers)])
        await _of_superlink(inner.send(head))
        body = self._body(patience)
        async for data in _check_whole(body) if target == REPLIES else body:
            await _of_superlink(inner.send(h11.Data(data=data)))
        await _of_superlink(inner.send(h11.EndOfMessage()))

    async def _body(self, patience: _Patience) -> AsyncIterator[bytes]:
        while isinstance(data := await patience.wait(self.client.event()), h11.Data):
            patience.renew(len(data.data))
            yield data.data
        if not isinstance(data, h11.EndOfMessage):
            raise Refusal(400, "body cut off")

    async def _answer(self, inner: Side, patience: _Patience) -> bool:
        response = await _of_superlink(inner.event())
        if not isinstance(response, h11.Response):
            raise Refusal(502, "the SuperLink did not answer")
        # Other headers concern the SuperLink's connection alone; these two describe the body.
        kept = [h for h in response.headers if h[0] in (b"content-type", b"content-length")]
        self.is_answered = True
        head = h11.Response(status_code=response.status_code, headers=kept)
        await patience.wait(self.client.send(head))
        while isinstance(data := await _of_superlink(inner.event()), h11.Data):
            patience.renew(len(data.data))
            await patience.wait(self.client.send(data))
        if not isinstance(data, h11.EndOfMessage):
            raise Refusal(502, "the SuperLink's answer was cut off")
        await patience.wait(self.client.send(h11.EndOfMessage()))
        self._idle_since = time.monotonic()
        return response.status_code == 200

    async def _reach_superlink(self) -> Side:
        if self._inner:
            http, idle = self._inner.http, time.monotonic() - self._idle_since
            if http.our_state is http.their_state is h11.DONE and idle < _REUSE_SECONDS:
                http.start_next_cycle()
                return self._inner
            await self._inner.close()
        self._inner = await self._superlink.connect()
        return self._inner


async def _check_whole(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
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
