"""Sending messages over any Flower grid, and handling each answer as it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, get_args

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

from fedsim.federation import wire
from fedsim.training.server import Census
from fedsim.types import FedsimError, Unit
from fedsim.words import number_of, printable

OnWait = Callable[[int], None]
"""Called with the number of connected nodes while more have to connect."""
_POLL_SECONDS = 0.05
_GONE = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
START_SECONDS = 600.0
"""Seconds that the first answer may take, since an engine's workers import torch and load the data
before they answer."""
# How long a node that has just come may take to say who it is.
_RETURN_SECONDS = 30.0


CENSUS = "census"
"""Action of the query that asks how much a node holds, and whether it would answer every stack."""

# Limits: reasons kept per node, characters kept per reason.
_REASONS, _REASON = 20, 500


class _CensusAnswer(BaseModel):
    model_config = ConfigDict(strict=True)

    held: Annotated[int, Field(ge=0, lt=2**40)]
    statistics: Json[dict[str, list[str]]]


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Says how an engine's messages travel."""

    own_machines: bool = False
    """Whether each client has a machine of its own. If so, an order expires when its answer would
    be late, and the probes of a round are sent together. Otherwise clients take turns."""
    run: str = ""
    """Name of the run if nodes draw noise from secrets of their own; else empty."""


def exchange(
    grid: Grid, messages: Sequence[Message], timeout: float, *, expire_after: float | None = None
) -> Iterator[tuple[int, Message | None]]:
    """Sends `messages` when first iterated; yields (position in `messages`, reply) as these arrive.

    Each message whose answer is late follows as (position, None). An answer is late if Flower says
    that it expired, its node is gone, or no answer at all has come for `timeout` seconds: so no
    client is late because it waited for a free worker. A reply may hold an error of its client.

    Args:
        grid: The grid that carries the messages.
        messages: Messages, each to one node.
        timeout: Seconds without any answer after which all that are left are late.
        expire_after: Seconds after which a message is void; None for Flower's 12 hours.
    """
    pending: dict[str, int] = {}
    late: list[int] = []
    for position, message in enumerate(messages):
        if expire_after is not None:
            message.metadata.ttl = expire_after
        sent = list(grid.push_messages([message]))
        if sent and sent[0]:  # of a node that is gone, Flower returns nothing, None or ""
            pending[sent[0]] = position
        else:
            late.append(position)
    heard = time.monotonic()
    while pending and time.monotonic() - heard < timeout:
        answered = False
        for sent_as in list(pending):
            # One message at a time: its reply is handled and dropped before the next is fetched.
            for reply in grid.pull_messages([sent_as]):
                position = pending.pop(sent_as)
                if reply.has_error() and reply.error.code in _GONE:
                    late.append(position)
                else:
                    yield position, reply
                answered = True
                heard = time.monotonic()
        if not answered:
            time.sleep(_POLL_SECONDS)
    for position in sorted([*pending.values(), *late]):
        yield position, None


def _roll_call(
    grid: Grid,
    clients: int,
    content: RecordDict,
    action: str,
    patience: float,
    on_wait: OnWait | None = None,
) -> Iterator[tuple[int, int, RecordDict]]:
    """Asks one node of each of `clients` clients; yields (client, node id, answer), or refuses."""
    begun = time.monotonic()
    answered: set[int] = set()
    named: set[int] = set()
    told = -1
    while True:
        there = set(grid.get_node_ids())
        asked = sorted(there - answered)
        if not asked and len(answered) >= clients:
            break
        waited = time.monotonic() - begun
        # Nodes load their data before they answer, which may take longer than to connect.
        if waited > (patience if len(there) < clients else START_SECONDS):
            raise FedsimError(
                f"{number_of(len(there), 'node')} of {clients} came in {waited:.0f} s, and "
                f"{len(answered)} answered; start one node per client, each with a key that the "
                "SuperLink knows: one that was started anew without its database knows none"
            )
        if len(there) < clients:
            if on_wait and len(there) != told:
                told = len(there)
                on_wait(told)
            time.sleep(_POLL_SECONDS)
            continue
        messages = [Message(content, node, f"query.{action}") for node in asked]
        for position, reply in exchange(grid, messages, START_SECONDS, expire_after=START_SECONDS):
            if reply is None:
                continue
            if reply.has_error():
                said = printable(str(reply.error.reason)[:_REASON])
                raise FedsimError(f"a node refuses: {said}")
            # Only an answer takes a node off the list: one that went away is asked again once it is
            # back.
            answered.add(asked[position])
            if action == CENSUS:
                _check_version(reply.content)  # another version may name its client otherwise
            client = wire.read_client(reply.content)
            if client in named:
                raise FedsimError(
                    f"two nodes say that they are client {client}; give each its own id"
                )
            named.add(client)
            yield client, asked[position], reply.content
    if missing := set(range(clients)) - named:
        raise FedsimError(f"no node is client {min(missing)}; number the nodes 0 to {clients - 1}")


class Nodes:
    """Keeps track of which node speaks for which client: a restarted one has another id."""

    def __init__(self, grid: Grid, clients: int, patience: float = START_SECONDS) -> None:
        """Knows no node yet; `gather` waits `patience` seconds for those of so many `clients`."""
        self._grid = grid
        self._count = clients
        self._patience = patience
        self._of: dict[int, int] = {}
        self._known: set[int] = set()

    def gather(self, done: int) -> None:
        """Waits for one node of each client, and tells all that `done` rounds are done.

        A FedsimError says that some did not come in time, one refuses, or two are one client. Nodes
        remove what they kept of later rounds.
        """
        greeting = wire.greeting(done)
        calls = _roll_call(self._grid, self._count, greeting, wire.IDENTIFY, self._patience)
        # In place: others hold `by_client`.
        self._of.update({client: node for client, node, _ in calls})
        self._known = set(self._of.values())

    def refresh(self, done: int) -> list[str]:
        """Admits nodes that came since the last call, and tells them that `done` rounds are done.

        It returns a line of text about each node that is refused. A new node takes the place of a
        client's old one only if that is disconnected or does not answer.
        """
        there = set(self._grid.get_node_ids())
        came, self._known = sorted(there - self._known), there
        if not came:
            return []
        refused = []
        for node, reply in self._greet(came, done):
            if reply is None or reply.has_error():
                self._known.discard(node)  # it is asked again
                continue
            try:
                client = wire.read_client(reply.content)
            except wire.MalformedError as error:
                refused.append(f"node {node}: {error}")
                continue
            if client not in self._of:
                refused.append(f"node {node}: client {client} is none of this federation")
            # A node that crashed may stay listed for a while: it is asked before another takes its
            # place.
            elif self._of[client] in there - {node} and self._answers(self._of[client], done):
                refused.append(f"node {node}: client {client} has a node already")
            else:
                self._of[client] = node
        return refused

    @property
    def by_client(self) -> Mapping[int, int]:
        """Node id by client number, of all clients after `gather`; `refresh` may change it."""
        return self._of

    def _answers(self, node: int, done: int) -> bool:
        ((_, reply),) = self._greet([node], done)
        return reply is not None and reply.has_content()

    def _greet(self, nodes: Sequence[int], done: int) -> Iterator[tuple[int, Message | None]]:
        greeting = wire.greeting(done)
        messages = [Message(greeting, node, f"query.{wire.IDENTIFY}") for node in nodes]
        for position, reply in exchange(
            self._grid, messages, _RETURN_SECONDS, expire_after=_RETURN_SECONDS
        ):
            yield nodes[position], reply


def answer_census(client: int, held: int, statistics: Mapping[Unit, tuple[str, ...]]) -> RecordDict:
    """Returns the content of the answer of `client` to the question how much it holds.

    `held` is its number of examples. `statistics` lists in words, for each privacy unit, the parts
    of the set-up that depend on one unit's data without noise.
    """
    said = json.dumps({unit: list(reasons) for unit, reasons in statistics.items()})
    told = ConfigRecord(
        {"version": wire.VERSION, wire.CLIENT: client, "held": held, "statistics": said}
    )
    return RecordDict({wire.CONFIG: told})


def take_census(grid: Grid, clients: int, patience: float, on_wait: OnWait | None = None) -> Census:
    """Asks the nodes of all clients how many examples they hold; returns what they answer.

    Their private statistics (`Census`) are joined, each once: of a node at most 20 for each unit,
    each cut at 500 characters. A FedsimError says that nodes are missing, one refuses, has another
    version or answers something else, or two are one client.

    Args:
        grid: The grid to which nodes connect.
        clients: Number of clients, with a node each.
        patience: Seconds in which all nodes have to connect; then they have 600 s to answer.
        on_wait: Called with the number of connected nodes while some are missing, or None.
    """
    held: dict[int, int] = {}
    statistics: dict[Unit, list[str]] = {unit: [] for unit in get_args(Unit)}
    for client, _, content in _roll_call(grid, clients, RecordDict(), CENSUS, patience, on_wait):
        held[client], reasons = _read_census(content)
        for unit, own in statistics.items():
            # Clients of one scenario give equal reasons, and one is enough.
            own += [reason for reason in reasons.get(unit, []) if reason not in own]
    return Census(
        held=[held[client] for client in range(clients)],
        private_statistics={unit: tuple(own) for unit, own in statistics.items()},
    )


def _check_version(content: RecordDict) -> None:
    # Version 1 did not say which it was.
    version = str(wire.config_of(content).get("version", "1"))
    if version != wire.VERSION:
        raise FedsimError(
            f"a node's messages are of version {printable(version)[:40]}, and this server's of "
            f"version {wire.VERSION}: install the same fedsim on both sides"
        )


def _read_census(content: RecordDict) -> tuple[int, Mapping[str, list[str]]]:
    try:
        told = _CensusAnswer.model_validate(dict(wire.config_of(content)))
    except ValidationError as error:
        raise FedsimError("a node answers a census with something else") from error
    return told.held, {
        unit: [printable(reason)[:_REASON] for reason in said[:_REASONS]]
        for unit, said in told.statistics.items()
    }
