"""The grid of the local engine: Flower's, inside this process, one client at a time, no Ray.

Messages go through Flower's serialization both ways: no client shares memory with another side.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_to_proto
from flwr.common.serde_utils import metadata_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsim.federation import client_app, server_app
from fedsim.system.memory import keep_freed
from fedsim.training.server import Server
from fedsim.training.workload import Workload

_RUN_ID = 1
_FIRST_NODE = 2  # 1 is the server's


class LocalGrid(Grid):
    """A grid that runs `app` in this process for the nodes of partition-id 0 to `clients` - 1."""

    def __init__(self, app: ClientApp, clients: int, timeout: float) -> None:
        """Prepares `clients` nodes; one that computes for longer than `timeout` seconds is late."""
        self._app = app
        self._timeout = timeout
        self._run = Run.create_empty(_RUN_ID)
        self._nodes = range(_FIRST_NODE, _FIRST_NODE + clients)
        self._contexts: dict[int, Context] = {}
        self._waiting: dict[str, tuple[Metadata, bytes]] = {}
        self._last: tuple[RecordDict | None, bytes] = (None, b"")
        self._sent = 0

    def set_run(self, run: Run) -> None:
        """Sets the run that messages belong to, see `flwr.server.Grid`."""
        self._run = run

    @property
    def run(self) -> Run:
        """Run that messages belong to, see `flwr.server.Grid`."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Makes a message to the node `dst_node_id`, see `flwr.server.Grid`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Returns node ids by ascending partition-id."""
        return self._nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Queues `messages` and returns their ids; clients run only once the replies are pulled."""
        ids = []
        for message in messages:
            self._sent += 1
            message_id = f"{self._sent:032x}"
            message.metadata.__dict__["_message_id"] = message_id
            if message.content is not self._last[0]:  # the messages of a round share theirs
                data = recorddict_to_proto(message.content).SerializeToString()
                self._last = (message.content, data)
            self._waiting[message_id] = (message.metadata, self._last[1])
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yields the replies to queued messages in the order of ids; unknown ids are left out.

        A client runs when its reply is read. One that fails or is late has a reply with an error.
        """
        for message_id in message_ids:
            waiting = self._waiting.pop(message_id, None)
            if waiting is not None:
                self._last = (None, b"")  # what is sent from now on may be another round's
                yield self._deliver(*waiting)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Returns the replies to `messages` in order; `timeout` gives way to the grid's own."""
        return list(self.pull_messages(self.push_messages(messages)))

    def _deliver(self, metadata: Metadata, content: bytes) -> Message:
        # The content was serialized once for all clients of the round; only the envelope is each
        # one's own.
        envelope = ProtoMessage(metadata=metadata_to_proto(metadata)).SerializeToString()
        arrived = ProtoMessage.FromString(envelope)
        arrived.content.ParseFromString(content)
        received = message_from_proto(arrived)
        context = self._context(received.metadata.dst_node_id)
        start = time.monotonic()
        try:
            reply = self._app(received, context)
        except Exception as error:  # a client may fail in any way; the others go on
            reason = f"{type(error).__name__}: {error}"
            reply = Message(
                Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=received
            )
        # Judged afterwards, since a client in this process cannot be interrupted.
        if time.monotonic() - start > self._timeout:
            reply = Message(
                Error(code=ErrorCode.REPLY_MESSAGE_UNAVAILABLE, reason="late"), reply_to=received
            )
        return message_from_proto(
            ProtoMessage.FromString(message_to_proto(reply).SerializeToString())
        )

    def _context(self, node: int) -> Context:
        if node not in self._contexts:
            self._contexts[node] = Context(
                run_id=_RUN_ID,
                node_id=node,
                node_config={
                    "partition-id": node - _FIRST_NODE,
                    "num-partitions": len(self._nodes),
                },
                state=RecordDict(),
                run_config={},
            )
        return self._contexts[node]


def train(job: client_app.FederationJob, server: Server, on_round: server_app.OnRound) -> None:
    """Trains here, see `FlowerEngine.train`; builds a `Workload` unless `server` is one."""
    workload = server if isinstance(server, Workload) else job.workload()
    scenario, clients = workload.scenario, client_app.build(job, workload)
    grid = LocalGrid(clients, scenario.data.clients, scenario.federation.timeout)
    run_server(server_app.build(workload.server(), Path(job.out), on_round), grid)


def run_server(server_app: ServerApp, grid: Grid) -> None:
    """Runs the ServerApp to its end in this process; `grid` carries messages to its clients."""
    keep_freed()  # each message is made of the same large pieces as the one before
    context = Context(
        run_id=_RUN_ID, node_id=SUPERLINK_NODE_ID, node_config={}, state=RecordDict(), run_config={}
    )
    with identity():
        server_app(grid, context)


@contextmanager
def identity() -> Iterator[None]:
    """Lets this process act as a Flower server, in whose name a `with` block sends messages."""
    before = vars(TaskIdentity).copy()
    TaskIdentity.task_id, TaskIdentity.run_id = 1, _RUN_ID
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    try:
        yield
    finally:
        for name in ("_task_id", "_run_id", "_node_id"):
            setattr(TaskIdentity, name, before[name])
