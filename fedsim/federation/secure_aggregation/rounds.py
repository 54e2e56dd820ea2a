"""How a server carries out one round's secure sum over any Flower grid, in five exchanges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsim.federation import wire
from fedsim.federation.delivery import Delivery, exchange
from fedsim.federation.screening import Screening, Tally, explain_missing
from fedsim.federation.secure_aggregation import messages, plan
from fedsim.federation.secure_aggregation.secrets import Published
from fedsim.federation.secure_aggregation.server import SumServer
from fedsim.federation.secure_aggregation.terms import AbortedError, Ring
from fedsim.federation.wire import size_of
from fedsim.training.server import Server

AskMasked = Callable[[RecordDict], RecordDict]
"""Takes the `messages.table` of a client's boxes; returns the order for its masked vector."""


@dataclass(frozen=True, kw_only=True)
class _OpenedSum:
    total: Ring
    clients: list[int]
    """Clients whose vectors are in the sum, ascending."""
    reply: Message
    """Reply of one of the clients; its content is replaced by the result for the strategy."""


class SecureSum:
    """Carries out one round's sum by messages over a grid; its `layout` reads the opened vector."""

    def __init__(
        self,
        grid: Grid,
        server: Server,
        round: int,
        delivery: Delivery,
        *,
        nodes: Mapping[int, int],
        tally: Tally,
    ) -> None:
        """Prepares a sum, and sends nothing yet; fewer than two participants are a FedsimError.

        Args:
            grid: The grid that carries the messages.
            server: The stack's `Server`, of a stack with secure sums.
            round: Number of the round, from 1.
            delivery: How messages travel.
            nodes: Node id by client.
            tally: Told of failures and of bytes.
        """
        self._grid, self._round, self._nodes = grid, round, nodes
        # On a machine of its own, a node works off no order whose answer would be late.
        self._expire = delivery.own_machines
        self._timeout = server.scenario.federation.timeout
        self._tally = tally
        self._server = SumServer(plan.terms(server, round, delivery.run))
        self.layout = plan.layout(server, round)
        self._published: dict[int, Published] = {}
        self.arrived: list[int] = []
        """Clients whose masked vectors have come, opened or not, in order of arrival."""

    def run(
        self, clients: Collection[int], ask: AskMasked, on_masked: Callable[[int, Ring], None]
    ) -> _OpenedSum | None:
        """Carries out the sum among `clients`, once; returns None if nothing is opened.

        The tally is then told the reason. Else the result has the vector without masks (`total`),
        the `clients` in it, ascending, and one client's `reply`. `ask` makes the order for a masked
        vector out of the `messages.table` of a client's boxes. `on_masked` is called with each
        client and its masked vector. The tally counts no bytes of probes in answers.
        """
        try:
            self._keys(clients)
            self._shares()
            self._collect_masked(ask, on_masked)
            self._agree()
            return self._unmask()
        except AbortedError as error:
            self._tally.say(f"secure aggregation: {error}")
            return None

    def _keys(self, clients: Collection[int]) -> None:
        order = messages.table(self._round, {})
        for client, reply in self._exchange(wire.KEYS, dict.fromkeys(clients, order)):
            with self._losing(client):
                self._published[client] = Published.from_bytes(_own_entry(reply.content, client))
        self._server.publish(self._published)

    def _shares(self) -> None:
        table = {client: one.to_bytes() for client, one in self._published.items()}
        order = messages.table(self._round, table)
        for client, reply in self._exchange(wire.SHARES, dict.fromkeys(table, order)):
            with self._losing(client):
                boxes = messages.read_table(reply.content)
                self._server.share(client, boxes)

    def _collect_masked(self, ask: AskMasked, on_masked: Callable[[int, Ring], None]) -> None:
        orders = {
            client: ask(messages.table(self._round, self._server.boxes_for(client)))
            for client in self._server.sharers
        }
        parts, size = len(self.layout.sums), self.layout.length
        for client, reply in self._exchange(wire.MASKED, orders, answers=parts):
            with self._losing(client):
                bits = self.layout.ring_bits
                vector, signature = messages.read_masked(reply.content, parts * size, bits)
                # Dropped at once, so that the round holds one vector and the sum.
                reply.content = RecordDict()
                # Probes ride in the same vector, and the tally counts training alone.
                self._tally.bytes_up -= vector.itemsize * (parts - 1) * size
                self._server.add(client, vector, signature)
                self.arrived.append(client)
                on_masked(client, vector)

    def _agree(self) -> None:
        survivors = self._server.survivors
        lists = {messages.LOST: self._server.lost}
        order = messages.table(self._round, self._server.signatures, **lists)
        # From here on a silent client only fails to help: its vector is in the sum already.
        for client, reply in self._exchange(
            wire.AGREE, dict.fromkeys(survivors, order), is_lost=False
        ):
            with self._losing(client, is_lost=False):
                self._server.agree(client, _own_entry(reply.content, client))

    def _unmask(self) -> _OpenedSum:
        agreed = self._server.agreed
        order = messages.table(self._round, agreed)
        answers: dict[int, Mapping[int, bytes]] = {}
        last: Message | None = None
        for client, reply in self._exchange(
            wire.UNMASK, dict.fromkeys(agreed, order), is_lost=False
        ):
            with self._losing(client, is_lost=False):
                answers[client] = messages.read_table(reply.content)
                last = reply
        total = self._server.reveal(answers)
        assert last is not None
        return _OpenedSum(total=total, clients=self._server.survivors, reply=last)

    def _exchange(
        self,
        action: str,
        orders: Mapping[int, RecordDict],
        *,
        answers: int = 1,
        is_lost: bool = True,
    ) -> Iterator[tuple[int, Message]]:
        """Sends orders, each asking for `answers` updates; yields the answers as they come."""
        clients = sorted(orders)
        sent = [Message(orders[one], self._nodes[one], f"train.{action}") for one in clients]
        # Clients share contents: each is measured once.
        sizes = {id(content): size_of(content) for content in orders.values()}
        self._tally.bytes_down += sum(sizes[id(orders[one])] for one in clients)
        # A client computes all its parts in one answer, and gets the time of as many.
        until = self._timeout * answers if self._expire else None
        for position, reply in exchange(self._grid, sent, self._timeout, expire_after=until):
            client = clients[position]
            if reply is not None and reply.has_content():
                self._tally.bytes_up += size_of(reply.content)
                yield client, reply
            else:
                self._lose(client, explain_missing(reply), is_lost=is_lost)

    @contextmanager
    def _losing(self, client: int, *, is_lost: bool = True) -> Iterator[None]:
        try:
            yield
        except (AbortedError, wire.MalformedError) as error:
            self._lose(client, Screening(reason="malformed", text=str(error)), is_lost=is_lost)

    def _lose(self, client: int, verdict: Screening, *, is_lost: bool) -> None:
        if is_lost:
            self._tally.fail(verdict, client, None)
        else:
            self._tally.say(f"client {client} did not help: {verdict.reason}: {verdict.text}")


def _own_entry(content: RecordDict, client: int) -> bytes:
    table = messages.read_table(content)
    if set(table) != {client}:
        raise AbortedError("the answer is of another client")
    return table[client]
