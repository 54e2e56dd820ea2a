"""Somebody on the wire between nodes and a SuperLink: a proxy, and what its capture tells.

Of TLS that is who sends how much, and when. Of plaintext it is everything, and `updates` reads each
client's from it, bit for bit. Nothing is changed on the way. A node pulls an order and pushes a
reply as objects, each in a request of its own; those that the SuperLink already has are not sent
again, so they are looked for in all that passed.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from flwr.app import Message
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedsim.federation import wire
from fedsim.federation.network.addresses import address_of, listener, split
from fedsim.system import processes
from fedsim.types import FedsimError

Direction = Literal["to_server", "to_client"]

PASSAGES = "passages.jsonl"
_CHUNK_BYTES = 64 * 1024
_TLS_HANDSHAKE = b"\x16\x03"
"""What TLS starts with: a record of the handshake, of version 3."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Describes bytes that passed together."""

    connection: int
    """Connections are numbered from 1."""
    time: float
    """Seconds since 1970."""
    direction: Direction
    size: int
    """Bytes."""
    tls: bool
    """Whether the connection is encrypted."""


class Eavesdropper:
    """A proxy on loopback in front of `target`, in a process that ends with the block.

    It writes a line for each `Passage` into the folder `capture`; with `keep_bytes` also the bytes
    of each connection, for `updates`. `address` is where nodes are to connect to.
    """

    def __init__(
        self, listen: str, target: str, capture: Path, *, keep_bytes: bool = False
    ) -> None:
        self._listen, self._target = listen, target
        self._capture, self._keep_bytes = capture, keep_bytes
        self._stack = ExitStack()

    def __enter__(self) -> Eavesdropper:
        """Listens, then starts the process.

        Raises:
            FedsimError: the address is taken or not on loopback, or the capture exists.
        """
        try:
            host, _ = split(self._listen)
            if not ipaddress.ip_address(host).is_loopback:
                raise ValueError("it may listen on loopback alone")
            self._capture.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self._capture.iterdir()):
                raise ValueError(f"{self._capture} is not empty")
            server = listener(self._listen)
        except (OSError, ValueError) as error:
            raise FedsimError(
                f"the eavesdropper at {self._listen} cannot start: {error}; name a free address "
                "like 127.0.0.1:0, and a new folder"
            ) from error
        with server:
            self.address = address_of(server)
            arguments = (server, self._target, self._capture, self._keep_bytes)
            self._stack.enter_context(processes.child(_in_child, *arguments))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def passages(capture: Path) -> list[Passage]:
    """What passed, in the order of time."""
    lines = (capture / PASSAGES).read_text(encoding="utf-8").splitlines()
    return [Passage(**json.loads(line)) for line in lines]


def stored(capture: Path, connection: int, direction: Direction) -> Path:
    """Where the bytes of a connection are, if they were kept."""
    return capture / f"{connection}.{direction}"


class _Proxy:
    """Accepts connections and notes what passes on each."""

    def __init__(self, target: str, capture: Path, keep_bytes: bool, notes: io.FileIO) -> None:
        self._target, self._capture = target, capture
        self._keep_bytes, self._notes = keep_bytes, notes
        self._connections = 0

    async def run(self, server: socket.socket) -> None:
        """Passes bytes on until it is cancelled."""
        async with await asyncio.start_server(self._connect, sock=server) as running:
            await running.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        try:
            onward = await asyncio.open_connection(*split(self._target))
        except OSError:
            writer.close()
            return
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await asyncio.gather(
            self._pass_on(connection, "to_server", reader, onward[1], first),
            self._pass_on(connection, "to_client", onward[0], writer, first),
        )
        for end in (writer, onward[1]):
            end.close()

    async def _pass_on(
        self,
        connection: int,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        first: asyncio.Future[bytes],
    ) -> None:
        """Passes one direction on until its end; `first` becomes the first bytes of either."""
        with ExitStack() as stack:
            kept = None
            if self._keep_bytes:
                kept = stack.enter_context(_create(stored(self._capture, connection, direction)))
            with suppress(OSError):
                while data := await source.read(_CHUNK_BYTES):
                    if not first.done():
                        first.set_result(data)
                    passage = Passage(
                        connection=connection,
                        time=time.time(),
                        direction=direction,
                        size=len(data),
                        tls=first.result().startswith(_TLS_HANDSHAKE),
                    )
                    self._notes.write(json.dumps(asdict(passage)).encode() + b"\n")
                    if kept:
                        kept.write(data)
                    sink.write(data)
                    await sink.drain()
        with suppress(OSError):
            sink.write_eof()


def _create(path: Path) -> io.FileIO:
    """Opens a new file that only its owner may read; what is written is there at once."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def _in_child(server: socket.socket, target: str, capture: Path, keep_bytes: bool) -> None:
    with _create(capture / PASSAGES) as notes:
        asyncio.run(_Proxy(target, capture, keep_bytes, notes).run(server))


_FLEET = "/v1/fleet"
"""Path of Flower's API for nodes."""
_LINE_BYTES = 16 * 1024
"""Limit of the first line of a request or an answer; the gate's is the same."""


@dataclass(frozen=True, kw_only=True)
class Overheard:
    """Holds an update as it crossed the wire, and the order that it answers."""

    node: int
    """Flower's identifier of the node."""
    order: wire.Order
    answer: wire.WireAnswer


@dataclass(frozen=True)
class _Place:
    """Where an object's content is, so that a capture larger than the memory can be read."""

    path: Path
    start: int
    size: int
    is_pulled: bool

    def content(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start)
            body = file.read(self.size)
        form = PullObjectResponse if self.is_pulled else PushObjectRequest
        return bytes(form.FromString(body).object_content)


@dataclass
class _Traffic:
    """What passed, sorted out."""

    objects: dict[str, _Place] = field(default_factory=dict)
    orders: dict[str, ObjectTree] = field(default_factory=dict)
    """By the identifier of the message."""
    replies: dict[str, tuple[Metadata, ObjectTree]] = field(default_factory=dict)
    """The same; of a reply that a node announced again, the last."""

    def message(self, tree: ObjectTree) -> Message | None:
        """A message of what passed; None if a part of it did not."""
        names = {part.object_id for part in iterate_object_tree(tree)}
        if not names <= self.objects.keys():
            return None
        contents = {name: self.objects[name].content() for name in names}
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        return message


@dataclass(frozen=True)
class _Part:
    """A request or an answer: its first line, and its body with where it is."""

    line: str
    body: bytes
    start: int


def updates(capture: Path) -> Iterator[Overheard]:
    """The updates that nodes pushed, in the order in which they say that they made them.

    Answers that were cut off, errors and answers to queries are left out. One update is held at a
    time.

    Raises:
        FedsimError: the capture is of TLS, which shows sizes and times alone, or without bytes.
    """
    seen = passages(capture)
    plain = sorted({passage.connection for passage in seen if not passage.tls})
    if seen and not plain:
        raise FedsimError(
            f"{capture} is of TLS: it shows sizes and times alone (`passages`), and no update"
        )
    if plain and not stored(capture, plain[0], "to_server").exists():
        raise FedsimError(f"{capture} holds no bytes: capture with `keep_bytes`")
    return _updates(capture, plain)


def _updates(capture: Path, connections: list[int]) -> Iterator[Overheard]:
    traffic = _Traffic()
    for connection in connections:
        _sort(capture, connection, traffic)
    replies = sorted(traffic.replies.values(), key=lambda reply: reply[0].created_at)
    for metadata, tree in replies:
        asked = traffic.orders.get(metadata.reply_to_message_id)
        order, reply = asked and traffic.message(asked), traffic.message(tree)
        if order and reply and reply.has_content() and wire.ARRAYS in reply.content:
            with suppress(wire.MalformedError):  # the server refuses it, too
                yield _overheard(metadata.src_node_id, wire.read_order(order.content), reply)


def _overheard(node: int, order: wire.Order, reply: Message) -> Overheard:
    metrics: Mapping[str, object] = reply.content.metric_records.get(wire.METRICS, {})
    buffers = order.buffers if reply.content.array_records.get(wire.BUFFERS) else {}
    expected = wire.Shape(update=order.parameters, buffers=buffers, loss=wire.LOSS in metrics)
    answer = wire.read_answer(reply.content, expected)
    return Overheard(node=node, order=order, answer=answer)


def _sort(capture: Path, connection: int, traffic: _Traffic) -> None:
    """Adds what passed on one connection to `traffic`."""
    sent, received = (stored(capture, connection, d) for d in ("to_server", "to_client"))
    with sent.open("rb") as requests, received.open("rb") as answers:
        for request, answer in zip(_parts(requests), _parts(answers), strict=False):
            api, _, call = request.line.split()[1].rpartition("/")
            if api != _FLEET or answer.line.split()[1] != "200":
                continue
            if call == "push-object":
                name = PushObjectRequest.FromString(request.body).object_id
                place = _Place(sent, request.start, len(request.body), is_pulled=False)
                traffic.objects.setdefault(name, place)
            elif call == "pull-object":
                if PullObjectResponse.FromString(answer.body).object_available:
                    name = PullObjectRequest.FromString(request.body).object_id
                    place = _Place(received, answer.start, len(answer.body), is_pulled=True)
                    traffic.objects.setdefault(name, place)
            elif call == "pull-messages":
                pulled = PullMessagesResponse.FromString(answer.body)
                for message, tree in zip(
                    pulled.messages_list, pulled.message_object_trees, strict=True
                ):
                    traffic.orders[message.metadata.message_id] = tree
            elif call == "push-messages":
                pushed = PushMessagesRequest.FromString(request.body)
                for message, tree in zip(
                    pushed.messages_list, pushed.message_object_trees, strict=True
                ):
                    metadata = message.metadata
                    traffic.replies[metadata.message_id] = (metadata, tree)


def _parts(stream: io.BufferedReader) -> Iterator[_Part]:
    """The requests, or the answers, of one connection; one that was cut off ends them."""
    end = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    while line := stream.readline(_LINE_BYTES):
        try:
            headers = http.client.parse_headers(stream)
            size = int(headers["content-length"])
        except (TypeError, ValueError, http.client.HTTPException):
            return  # cut off, or not of Flower, which says every length in advance
        start = stream.tell()
        if not 0 <= size <= end - start:
            return
        body = stream.read(size)
        yield _Part(line.decode("latin-1"), body, start)
