"""Sending messages over any Flower grid, and handling each answer as it comes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsim.federation import wire
from fedsim.types import FedsimError

_POLL_SECONDS = 0.05
_EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
_START_SECONDS = 600.0
"""How long the first answer may take: an engine's workers import torch and load the data first."""


def exchange(
    grid: Grid, messages: Sequence[Message], timeout: float
) -> Iterator[tuple[int, Message | None]]:
    """Send `messages`; yield (position, reply) in order of arrival, then (position, None) for each
    that is late.

    An answer is late if Flower says that it expired, or if nobody has answered for `timeout`
    seconds: so a client is never late for having had to wait until an engine with fewer workers
    than clients got to it. Replies are handed over one at a time and not kept.
    """
    pending: dict[str, int] = {}
    late: list[int] = []
    for position, message in enumerate(messages):
        sent = list(grid.push_messages([message]))
        if sent:
            pending[sent[0]] = position
        else:
            late.append(position)  # the node is gone
    heard = time.monotonic()
    while pending and time.monotonic() - heard < timeout:
        answered = False
        for reply in grid.pull_messages(list(pending)):
            position = pending.pop(reply.metadata.reply_to_message_id, -1)
            if reply.has_error() and reply.error.code in _EXPIRED:
                late.append(position)
            elif position >= 0:
                yield position, reply
            answered = True
            heard = time.monotonic()
        if not answered:
            time.sleep(_POLL_SECONDS)
    for position in sorted([*pending.values(), *late]):
        yield position, None


def discover(grid: Grid, clients: int) -> dict[int, int]:
    """Ask every node which client it is: client -> node id.

    Raises:
        FedsimError: a client has no node, or two, or a node failed to answer.
    """
    begun = time.monotonic()
    while len(nodes := list(grid.get_node_ids())) < clients:
        if time.monotonic() - begun > _START_SECONDS:
            raise FedsimError(f"{len(nodes)} of {clients} nodes came; start one node per client")
        time.sleep(_POLL_SECONDS)
    query = RecordDict()
    messages = [Message(query, node, f"query.{wire.IDENTIFY}") for node in nodes]
    found: dict[int, int] = {}
    for position, reply in exchange(grid, messages, _START_SECONDS):
        if reply is None or reply.has_error():
            reason = "did not answer" if reply is None else str(reply.error.reason)[:500]
            raise FedsimError(f"a node of the federation failed at the start: {reason}")
        client = wire.read_client(reply.content)
        if client in found:
            raise FedsimError(f"two nodes say that they are client {client}; give each its own id")
        found[client] = nodes[position]
    missing = set(range(clients)) - set(found)
    if missing:
        raise FedsimError(f"no node is client {min(missing)}; number the nodes 0 to {clients - 1}")
    return found
