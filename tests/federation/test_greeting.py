"""Who is asked again, who is waited for, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsim.federation import wire
from fedsim.federation.delivery import Nodes, exchange, roll_call
from fedsim.federation.local import identity
from fedsim.types import FedsimError


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    """Flower lets nobody but a task make a message."""
    with identity():
        yield


class Answers:
    """A grid of two nodes that answers each message at once, as `reply` says."""

    def __init__(self, reply: Callable[[Message], Message | None], nodes: Iterable[int]) -> None:
        self.reply, self.nodes = reply, list(nodes)
        self.asked: list[int] = []
        self._sent: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        self.asked.append(message.metadata.dst_node_id)
        self._sent[str(len(self.asked))] = message
        return [str(len(self.asked))]

    def pull_messages(self, identifiers: Iterable[str]) -> list[Message]:
        replies = [self.reply(self._sent[name]) for name in identifiers]
        return [reply for reply in replies if reply]

    @property
    def grid(self) -> Grid:
        return cast(Grid, self)


def failure(code: int, to: Message) -> Message:
    return Message(Error(code=code, reason="why"), reply_to=to)


def client(message: Message) -> Message:
    return Message(wire.identity(message.metadata.dst_node_id - 10), reply_to=message)


def test_a_node_that_is_gone_is_late_without_being_waited_for() -> None:
    answers = Answers(lambda message: failure(ErrorCode.NODE_UNAVAILABLE, message), [10])
    message = Message(RecordDict(), 10, "train")
    assert list(exchange(answers.grid, [message], 60)) == [(0, None)]


def test_who_is_gone_before_it_answers_is_asked_again() -> None:
    def reply(message: Message) -> Message:
        if message.metadata.dst_node_id == 11 and answers.asked.count(11) < 3:
            return failure(ErrorCode.NODE_UNAVAILABLE, message)
        return client(message)

    answers = Answers(reply, [10, 11])
    nodes = Nodes(answers.grid, 2, patience=60)
    nodes.gather(0)
    assert nodes.by_client == {0: 10, 1: 11}
    assert sorted(answers.asked) == [10, 11, 11, 11]


def test_a_node_that_refuses_is_not_asked_again() -> None:
    answers = Answers(lambda to: failure(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, to), [10])
    with pytest.raises(FedsimError, match="a node refuses: why"):
        list(roll_call(answers.grid, 1, RecordDict(), "identify", 60))


def test_too_few_nodes_are_waited_for_only_so_long() -> None:
    answers = Answers(client, [10])
    told: list[int] = []
    with pytest.raises(FedsimError, match="1 node of 2 came in 0 s, and 0 answered"):
        list(roll_call(answers.grid, 2, RecordDict(), "identify", 0.2, told.append))
    assert told == [1]  # once, and not at every look
