"""Nodes that come, go and come back, and messages that nobody takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.federation import delivery, wire
from fedsim.federation.delivery import Nodes, exchange
from fedsim.federation.local import LocalGrid, identity


def app(numbers: dict[int, int]) -> ClientApp:
    """Nodes that say which client they are."""
    made = ClientApp()

    @made.query(wire.IDENTIFY)
    def identify(message: Message, context: Context) -> Message:
        return Message(wire.identity(numbers[context.node_id]), reply_to=message)

    return made


class Moving(LocalGrid):
    """A grid whose nodes come and go."""

    def __init__(self, numbers: dict[int, int], nodes: Iterable[int]) -> None:
        super().__init__(app(numbers), 9, 60.0)
        self.there = list(nodes)
        self.greeted: list[int] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.there)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node = message.metadata.dst_node_id
        self.greeted.append(node)
        return super().push_messages([message]) if node in self.there else [""]


@pytest.mark.parametrize("nothing", [[], [""], [None]])
def test_a_message_that_no_node_takes_is_late(nothing: list[str]) -> None:
    class Gone(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return nothing

    with identity():
        messages = [Message(RecordDict(), node, "query") for node in (2, 3)]
        found = list(exchange(Gone(ClientApp(), 3, 60.0), messages, timeout=5.0))
    assert found == [(0, None), (1, None)]


def test_replies_are_fetched_one_at_a_time() -> None:
    asked: list[int] = []

    class Counting(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            ids = list(message_ids)
            asked.append(len(ids))
            return super().pull_messages(ids)

    with identity():
        grid = Counting(app({2: 0, 3: 1, 4: 2}), 3, 60.0)
        greeting = wire.greeting(0)
        messages = [Message(greeting, node, f"query.{wire.IDENTIFY}") for node in (2, 3, 4)]
        assert len(list(exchange(grid, messages, timeout=5.0))) == 3
    assert asked == [1, 1, 1]


def test_an_order_is_void_when_its_answer_would_be_late() -> None:
    with identity():
        grid = LocalGrid(app({2: 0}), 1, 60.0)
        message = Message(wire.greeting(0), 2, f"query.{wire.IDENTIFY}")
        ((_, reply),) = exchange(grid, [message], timeout=5.0, expire_after=7.0)
    assert message.metadata.ttl == 7.0 and reply is not None


def test_a_node_that_comes_back_as_another_is_the_same_client() -> None:
    with identity():
        grid = Moving({2: 0, 3: 1, 4: 1}, [2, 3])
        nodes = Nodes(grid, 2)
        nodes.gather(0)
        grid.there = [2, 4]
        assert nodes.refresh(1) == []
        assert nodes.by_client == {0: 2, 1: 4}
        grid.greeted.clear()
        assert nodes.refresh(2) == [] and grid.greeted == []  # nobody is new


def test_who_claims_a_client_whose_node_answers_is_not_let_in() -> None:
    with identity():
        grid = Moving({2: 0, 3: 1, 4: 1, 5: 7}, [2, 3])
        nodes = Nodes(grid, 2)
        nodes.gather(0)
        grid.there = [2, 3, 4, 5]
        refused = nodes.refresh(1)
        assert nodes.by_client == {0: 2, 1: 3}
    assert "client 1 has a node already" in refused[0] and "client 7 is none" in refused[1]


def test_a_node_that_is_not_ready_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_RETURN_SECONDS", 0.1)
    with identity():
        grid = Moving({2: 0, 3: 1}, [2, 3])
        nodes = Nodes(grid, 2)
        nodes.gather(0)
        grid.there = [2, 6]  # of which nothing is known, so that its answer is an error
        assert nodes.refresh(1) == [] and nodes.by_client == {0: 2, 1: 3}
        grid.greeted.clear()
        nodes.refresh(2)
        assert grid.greeted == [6]
