"""Messages over a grid: who answers, who is late, who is asked again, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest
import torch
from clock import stopped
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsim.federation import delivery, wire
from fedsim.federation.delivery import Nodes, _roll_call, exchange
from fedsim.federation.local import LocalGrid, identity
from fedsim.types import FedsimError


@pytest.fixture(autouse=True)
def _server() -> Iterator[None]:
    """Flower lets nobody but a task make a message."""
    with identity():
        yield


class Answers:
    """A grid of `nodes` that answers each message at once, as `reply` says."""

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
        return [str(len(self.asked)) if self.asked[-1] in self.nodes else ""]

    def pull_messages(self, identifiers: Iterable[str]) -> list[Message]:
        replies = [self.reply(self._sent[name]) for name in identifiers]
        return [reply for reply in replies if reply]

    @property
    def grid(self) -> Grid:
        return cast(Grid, self)


def failure(code: int, to: Message) -> Message:
    return Message(Error(code=code, reason="why"), reply_to=to)


def identified(numbers: dict[int, int], nodes: Iterable[int]) -> Answers:
    """Nodes that say which client they are; others fail."""

    def reply(message: Message) -> Message:
        number = numbers.get(message.metadata.dst_node_id)
        if number is None:
            return failure(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, message)
        return Message(wire.identity(number), reply_to=message)

    return Answers(reply, nodes)


@pytest.mark.parametrize("nothing", [[], [""], [None]])
def test_a_message_that_no_node_takes_is_late(nothing: list[str]) -> None:
    class Gone(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return nothing

    messages = [Message(RecordDict(), node, "query") for node in (2, 3)]
    found = list(exchange(Gone(ClientApp(), 3, 60.0), messages, timeout=5.0))
    assert found == [(0, None), (1, None)]


def test_replies_are_fetched_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, fetched = identified({2: 0, 3: 1, 4: 2}, [2, 3, 4]), list[int]()
    pull = answers.pull_messages

    def counted(identifiers: Iterable[str]) -> list[Message]:
        fetched.append(len(list(identifiers)))
        return pull(identifiers)

    monkeypatch.setattr(answers, "pull_messages", counted)
    sent = [Message(wire.greeting(0), node, "query") for node in (2, 3, 4)]
    assert len(list(exchange(answers.grid, sent, timeout=5.0, expire_after=7.0))) == 3
    assert fetched == [1, 1, 1]
    assert {message.metadata.ttl for message in sent} == {7.0}, "void when it would be late"


def test_a_node_that_comes_back_as_another_is_the_same_client() -> None:
    moving = identified({2: 0, 3: 1, 4: 1}, [2, 3])
    nodes = Nodes(moving.grid, 2)
    nodes.gather(0)
    moving.nodes = [2, 4]
    assert nodes.refresh(1) == []
    assert nodes.by_client == {0: 2, 1: 4}
    moving.asked.clear()
    assert nodes.refresh(2) == [] and moving.asked == []  # nobody is new


def test_who_claims_a_client_whose_node_answers_is_not_let_in() -> None:
    moving = identified({2: 0, 3: 1, 4: 1, 5: 7}, [2, 3])
    nodes = Nodes(moving.grid, 2)
    nodes.gather(0)
    moving.nodes = [2, 3, 4, 5]
    refused = nodes.refresh(1)
    assert nodes.by_client == {0: 2, 1: 3}
    assert "client 1 has a node already" in refused[0] and "client 7 is none" in refused[1]


def test_a_node_that_is_not_ready_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_RETURN_SECONDS", 0.1)
    moving = identified({2: 0, 3: 1}, [2, 3])
    nodes = Nodes(moving.grid, 2)
    nodes.gather(0)
    moving.nodes = [2, 6]  # of which nothing is known, so that its answer is an error
    assert nodes.refresh(1) == [] and nodes.by_client == {0: 2, 1: 3}
    moving.asked.clear()
    nodes.refresh(2)
    assert moving.asked == [6]


def test_two_nodes_of_one_client_are_refused() -> None:
    with pytest.raises(FedsimError, match="two nodes say that they are client 0"):
        Nodes(identified({2: 0, 3: 0}, [2, 3]).grid, 2).gather(0)


def test_a_node_that_is_gone_is_late_without_being_waited_for() -> None:
    answers = Answers(lambda message: failure(ErrorCode.NODE_UNAVAILABLE, message), [10])
    message = Message(RecordDict(), 10, "train")
    assert list(exchange(answers.grid, [message], 60)) == [(0, None)]


def test_who_is_gone_before_it_answers_is_asked_again() -> None:
    def reply(message: Message) -> Message | None:
        if message.metadata.dst_node_id == 11 and answers.asked.count(11) < 3:
            return failure(ErrorCode.NODE_UNAVAILABLE, message)
        return named.reply(message)

    named = identified({10: 0, 11: 1}, [])
    answers = Answers(reply, [10, 11])
    nodes = Nodes(answers.grid, 2, patience=60)
    nodes.gather(0)
    assert nodes.by_client == {0: 10, 1: 11}
    assert sorted(answers.asked) == [10, 11, 11, 11]


def test_a_node_that_refuses_is_not_asked_again() -> None:
    answers = Answers(lambda to: failure(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, to), [10])
    with pytest.raises(FedsimError, match="a node refuses: why"):
        list(_roll_call(answers.grid, 1, RecordDict(), "identify", 60))


def test_too_few_nodes_are_waited_for_only_so_long() -> None:
    answers = identified({10: 0}, [10])
    told: list[int] = []
    with pytest.raises(FedsimError, match="1 node of 2 came in 0 s, and 0 answered"):
        list(_roll_call(answers.grid, 2, RecordDict(), "identify", 0.2, told.append))
    assert told == [1]  # once, and not at every look


def grid(answer: Callable[[Message, Context], Message], timeout: float = 60.0) -> LocalGrid:
    app = ClientApp()
    app.train()(answer)
    app.query("identify")(answer)
    return LocalGrid(app, 3, timeout)


def messages(content: RecordDict) -> list[Message]:
    return [Message(content, node, "train") for node in (2, 3, 4)]


def test_clients_share_no_memory_with_the_server_or_each_other() -> None:
    def scribble(message: Message, context: Context) -> Message:
        message.content.array_records["arrays"].clear()
        context.state["mine"] = wire.encode({"x": torch.zeros(1)})
        return Message(RecordDict({"state": wire.encode({})}), reply_to=message)

    sent = RecordDict({"arrays": wire.encode({"x": torch.ones(2)})})
    local = grid(scribble)
    replies = local.send_and_receive(messages(sent))
    assert len(replies) == 3 and "x" in sent.array_records["arrays"]


def test_a_message_content_used_again_is_sent_as_it_is_then() -> None:
    """The messages of a round share theirs, and it is serialized once; the next round's is not."""
    seen = []

    def look(message: Message, context: Context) -> Message:
        seen.append(float(wire.decode(message.content["arrays"])["x"]))  # type: ignore[arg-type]
        return Message(RecordDict(), reply_to=message)

    content = RecordDict({"arrays": wire.encode({"x": torch.tensor(1.0)})})
    local = grid(look)
    local.send_and_receive(messages(content))
    content["arrays"] = wire.encode({"x": torch.tensor(2.0)})
    local.send_and_receive(messages(content))
    assert seen == [1.0] * 3 + [2.0] * 3


def test_waiting_for_a_worker_makes_nobody_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, three clients of 0.15 s: the last answers after 0.45 s, on time at 0.3 s."""
    clock = stopped(monkeypatch)

    class OneWorker(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            return super().pull_messages(list(message_ids)[:1])

    def answer(message: Message, context: Context) -> Message:
        clock.sleep(0.15)
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(answer)
    found = list(exchange(OneWorker(app, 3, 60.0), messages(RecordDict()), timeout=0.3))
    assert len(found) == 3 and all(reply is not None for _, reply in found)


def test_silence_makes_an_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch)

    class Silent(LocalGrid):
        def pull_messages(self, message_ids: object) -> object:  # type: ignore[override]
            return []

    silent = Silent(ClientApp(), 3, 60.0)
    found = list(exchange(silent, messages(RecordDict()), timeout=0.1))
    assert found == [(0, None), (1, None), (2, None)]
