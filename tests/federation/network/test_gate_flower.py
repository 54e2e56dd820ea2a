"""A SuperLink with the keys of `fedsim keys`, behind the gate: nodes work, others get nowhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from click.testing import Result
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.serde import message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node as NodeIdentity
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.runtime import RuntimeHttpClient
from network_support import (
    Authority,
    SuperLink,
    flower_program,
    gate,
    node_key,
    running_superlink,
    until,
)
from typer.testing import CliRunner

from fedsim.cli.network import add_to
from fedsim.federation.local import identity
from fedsim.federation.network.superlink import Child, free_port


@dataclass
class Federation:
    """A SuperLink with registered nodes, the gate before it, and a key that nobody registered."""

    folder: Path
    link: SuperLink
    gate: str
    log: Path
    nodes: dict[Path, int]
    stranger: Path


def command(*words: str) -> Result:
    app = typer.Typer()
    add_to(app)
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    made = command("keys", str(folder / "keys"), "-n", "5", "--host", "::1", "--host", "127.0.0.1")
    assert made.exit_code == 0, made.output
    server = folder / "keys" / "superlink"
    authority = Authority(server)
    *keys, _, stranger = (folder / "keys" / f"node-{number}" / "key" for number in range(5))
    with running_superlink(server) as link:
        nodes = {key: link.register(public_of(folder, key)) for key in keys}
        log = folder / "gate.log"
        with gate(authority, link.address, log) as (address, _):
            yield Federation(folder, link, address, log, nodes, stranger)


def public_of(folder: Path, key: Path) -> Path:
    return folder / "keys" / "runner" / f"{key.parent.name}.pub"


class Catcher:
    """Keeps the requests of a client, as somebody who could read them would."""

    def __init__(self) -> None:
        self.caught: list[httpx.Request] = []

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        self.caught.append(context.request)
        return call_next(context)


def status(call: Callable[[], Any]) -> int:
    try:
        call()
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


def order(to: int) -> Message:
    return Message(RecordDict({"a": ArrayRecord([np.arange(5.0)])}), to, "train", group_id="1")


def announce(node: int, message: Message) -> PushMessagesRequest:
    return PushMessagesRequest(
        node=NodeIdentity(node_id=node),
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
        clientapp_runtime_list=[1.0],
    )


@pytest.mark.slow
def test_a_supernode_is_let_in(federation: Federation) -> None:
    link, key = federation.link, next(iter(federation.nodes))
    command = [flower_program("flower-supernode"), "--superlink", federation.gate]
    command += ["--isolation", "process", "--port", str(free_port())]
    command += ["--root-certificates", str(link.authority.certificate)]
    command += ["--auth-supernode-private-key", str(key)]

    def online() -> set[int]:
        with link.connect(ControlHttpClient) as control:
            there = control.ListNodes(ListNodesRequest()).nodes_info
        return {each.node_id for each in there if each.status == "online"}

    running = Child(command, federation.folder / "supernode.log")
    until(lambda: online() == {federation.nodes[key]}, "the node")
    running.stop()
    until(lambda: not online(), "the end")
    assert not federation.log.read_text()


def test_an_order_and_its_reply_pass(federation: Federation) -> None:
    link, update = federation.link, np.random.default_rng(0).random((300, 500))
    key = list(federation.nodes)[1]
    with link.run() as grid, link.node(key, federation.gate) as node:
        (sent,) = grid.push_messages([order(node.identifier)])
        pulled = node.pull()
        assert np.array_equal(pulled.content["a"].to_numpy_ndarrays()[0], np.arange(5.0))
        content = RecordDict({"a": ArrayRecord([update])})
        node.push(Message(content, reply_to=pulled))
        (answer,) = until(lambda: list(grid.pull_messages([sent])), "a reply")
    assert answer.metadata.src_node_id == node.identifier
    assert answer.content["a"].to_numpy_ndarrays()[0].tobytes() == update.tobytes()


def test_no_more_of_an_answer_is_read_than_was_asked_for(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pull = RuntimeHttpClient.PullObject

    def watched(self: RuntimeHttpClient, request: Any) -> Any:
        answer = pull(self, request)
        read.append(len(answer.object_content))
        return answer

    monkeypatch.setattr(RuntimeHttpClient, "PullObject", watched)
    key = list(federation.nodes)[1]
    with federation.link.run() as grid, federation.link.node(key) as node:
        grid.most_bytes = 100_000

        def answered(count: int, size: int) -> Message:
            read.clear()
            order = RecordDict({"order": ConfigRecord({"count": count})})
            sent = list(grid.push_messages([Message(order, node.identifier, "train")]))
            arrays = [np.full(size, number, np.uint8) for number in range(count)]
            content = RecordDict({"arrays": ArrayRecord(arrays)})
            node.push(Message(content, reply_to=node.pull()))
            (reply,) = until(lambda: list(grid.pull_messages(sent)), "an answer")
            assert isinstance(reply, Message)
            return reply

        for count, size, is_read in ((3, 10_000, True), (9, 50_000, False), (1, 3_000_000, False)):
            assert answered(count, size).has_content() == is_read
            assert sum(read) < 100_000
            assert answered(2, 100).has_content(), "the next one counts for itself"


def test_a_stranger_is_no_node(federation: Federation) -> None:
    """Neither with a key of its own nor under a node's identifier or public key."""
    key, identifier = next(iter(federation.nodes.items()))
    own = try_load_public_key(public_of(federation.folder, federation.stranger))
    theirs = try_load_public_key(public_of(federation.folder, key))
    pull = PullMessagesRequest(node=NodeIdentity(node_id=identifier))
    read = PullObjectRequest(node=NodeIdentity(node_id=identifier), run_id=1, object_id="0" * 64)
    with identity(), federation.link.fleet(federation.stranger, federation.gate) as fleet:
        assert status(lambda: fleet.RegisterNode(RegisterNodeFleetRequest(public_key=own))) >= 400
        for public in (own, theirs):
            activation = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
            assert status(lambda a=activation: fleet.ActivateNode(a)) >= 400
        assert status(lambda: fleet.PullMessages(pull)) == 401
        assert status(lambda: fleet.PullObject(read)) == 401
        assert status(lambda: fleet.PushMessages(announce(identifier, order(1)))) >= 400


@pytest.mark.parametrize("way", ["superlink", "gate"])
def test_what_somebody_read_cannot_be_sent_again(federation: Federation, way: str) -> None:
    """The SuperLink takes it again, and the signature for other requests, too; the gate refuses."""
    key, identifier = list(federation.nodes.items())[2]
    address = federation.gate if way == "gate" else federation.link.address
    catcher = Catcher()
    with federation.link.fleet(key, address, catcher) as fleet:
        fleet.PullMessages(PullMessagesRequest(node=NodeIdentity(node_id=identifier)))
        (caught,) = catcher.caught
        other = {n: v for n, v in caught.headers.items() if n != "content-length"}
        activation = ActivateNodeRequest(
            public_key=try_load_public_key(public_of(federation.folder, key)), heartbeat_interval=30
        )
        address = f"https://{address}/v1/fleet"
        again = fleet._client.post(
            f"{address}/pull-messages", content=caught.content, headers=caught.headers
        )
        forged = fleet._client.post(
            f"{address}/activate-node", content=activation.SerializeToString(), headers=other
        )
        stale = (datetime.now(UTC) - timedelta(seconds=306)).isoformat()
        signature = b64encode(sign_message(node_key(key), stale.encode())).decode()
        late = fleet._client.post(
            f"{address}/pull-messages",
            content=caught.content,
            headers={**caught.headers, "flwr-timestamp": stale, "flwr-signature": signature},
        )
    expected = 200 if way == "superlink" else 401
    assert (again.status_code, forged.status_code) == (expected, expected)
    assert late.status_code == 401


@pytest.mark.parametrize("way", ["superlink", "gate"])
def test_a_node_cannot_speak_for_another_or_for_the_server(
    federation: Federation, way: str
) -> None:
    """The SuperLink believes it; the gate does not."""
    (victim_key, victim), (key, insider) = list(federation.nodes.items())[:2]
    link = federation.link
    address = federation.gate if way == "gate" else link.address
    expected = 400 if way == "gate" else 200
    with link.run() as grid, link.node(victim_key):
        (sent,) = grid.push_messages([order(victim)])
        with link.fleet(victim_key) as fleet:
            request = PullMessagesRequest(node=NodeIdentity(node_id=victim))
            (asked,) = fleet.PullMessages(request).messages_list
        with link.fleet(key, address) as fleet:
            assert status(lambda: fleet.PullMessages(pull_of(insider))) == 200
            forged_order = Message(RecordDict({"c": ConfigRecord({"a": 1})}), victim, "train")
            forged_order.metadata.__dict__.update(
                _run_id=asked.metadata.run_id, _src_node_id=1, _message_id=forged_order.object_id
            )
            assert status(lambda: fleet.PushMessages(announce(insider, forged_order))) == expected
            bare = announce(insider, order(1))
            metadata = bare.messages_list[0].metadata
            metadata.CopyFrom(asked.metadata)
            metadata.message_id = bare.message_object_trees[0].object_id
            metadata.reply_to_message_id = sent
            metadata.src_node_id, metadata.dst_node_id = victim, 1
            metadata.ttl = 10
            assert status(lambda: fleet.PushMessages(bare)) == expected


def pull_of(node: int) -> PullMessagesRequest:
    return PullMessagesRequest(node=NodeIdentity(node_id=node))


def test_a_superlink_registers_each_key_once(federation: Federation) -> None:
    runner, link = federation.folder / "keys" / "runner", federation.link
    words = ["register", str(runner / "node-3.pub"), "--superlink", link.address]
    words += ["--root-certificates", str(runner / "ca.crt")]
    first, second = (command(*words) for _ in range(2))
    assert (first.exit_code, first.output) == (0, "node-3.pub: registered\n")
    assert (second.exit_code, second.output) == (0, "node-3.pub: was registered already\n")
    with link.node(federation.folder / "keys" / "node-3" / "key") as node:
        assert node.identifier
    with link.connect(ControlHttpClient) as control:
        control.UnregisterNode(UnregisterNodeRequest(node_id=node.identifier))
    third = command(*words)
    assert third.exit_code == 2, "Flower lets in no node with this key again"
    assert "another key" in third.output
