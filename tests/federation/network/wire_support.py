"""Somebody on the wire between nodes and a SuperLink: a proxy, and what its capture tells.

Of plaintext that is everything: `updates` reads each client's update from it, bit for bit. A node
pulls an order and pushes a reply as objects, each in a request of its own; those that the SuperLink
already has are not sent again, so they are looked for in all that passed.
"""

from __future__ import annotations

import http.client
import io
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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
from fedsim.system.addresses import address_of, split


@contextmanager
def eavesdropper(target: str, capture: Path) -> Iterator[str]:
    """The address of a proxy in front of `target` that keeps all bytes in the folder `capture`."""
    capture.mkdir()
    numbers = itertools.count(1)

    class Passage(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            place = capture / str(next(numbers))
            with socket.create_connection(split(target)) as onward:
                there = self.request, onward, place.with_suffix(".to_server")
                back = onward, self.request, place.with_suffix(".to_client")
                threads = [threading.Thread(target=_pass_on, args=way) for way in (there, back)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Passage) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield address_of(server.socket)
        server.shutdown()


def _pass_on(source: socket.socket, sink: socket.socket, kept: Path) -> None:
    with kept.open("xb", buffering=0) as file, suppress(OSError):
        while data := source.recv(64 * 1024):
            file.write(data)
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True, kw_only=True)
class Overheard:
    """An update as it crossed the wire, and the order that it answers."""

    node: int
    order: wire.Order
    answer: wire.WireAnswer


@dataclass
class _Traffic:
    """What passed: contents by object, orders and replies by message."""

    objects: dict[str, bytes] = field(default_factory=dict)
    orders: dict[str, ObjectTree] = field(default_factory=dict)
    replies: dict[str, tuple[Metadata, ObjectTree]] = field(default_factory=dict)

    def message(self, tree: ObjectTree) -> Message | None:
        """A message of what passed; None if a part of it did not."""
        names = {part.object_id for part in iterate_object_tree(tree)}
        if not names <= self.objects.keys():
            return None
        contents = {name: self.objects[name] for name in names}
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        return message


def updates(capture: Path) -> Iterator[Overheard]:
    """The updates that nodes pushed, in the order in which they say that they made them.

    Errors and answers to queries are left out.
    """
    traffic = _Traffic()
    for sent in sorted(capture.glob("*.to_server")):
        _sort(sent, traffic)
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


def _sort(sent: Path, traffic: _Traffic) -> None:
    """Adds what passed on one connection to `traffic`."""
    requests, answers = sent.read_bytes(), sent.with_suffix(".to_client").read_bytes()
    for (line, body), (status, answer) in zip(_parts(requests), _parts(answers), strict=False):
        call = line.split()[1].rpartition("/")[2]
        if status.split()[1] != "200":
            continue
        if call == "push-object":
            pushed = PushObjectRequest.FromString(body)
            traffic.objects.setdefault(pushed.object_id, bytes(pushed.object_content))
        elif call == "pull-object":
            got = PullObjectResponse.FromString(answer)
            if got.object_available:
                name = PullObjectRequest.FromString(body).object_id
                traffic.objects.setdefault(name, bytes(got.object_content))
        elif call == "pull-messages":
            orders = PullMessagesResponse.FromString(answer)
            for message, tree in zip(
                orders.messages_list, orders.message_object_trees, strict=True
            ):
                traffic.orders[message.metadata.message_id] = tree
        elif call == "push-messages":
            replies = PushMessagesRequest.FromString(body)
            for message, tree in zip(
                replies.messages_list, replies.message_object_trees, strict=True
            ):
                traffic.replies[message.metadata.message_id] = (message.metadata, tree)


def _parts(content: bytes) -> Iterator[tuple[str, bytes]]:
    """First line and body of the requests, or the answers, of one connection."""
    stream = io.BytesIO(content)
    while line := stream.readline():
        size = int(http.client.parse_headers(stream)["content-length"])
        yield line.decode("latin-1"), stream.read(size)
