"""All that fedsim uses of Flower's deployment engine beyond its public interface.

Flower starts a process for each message, and runs the code of the bundle that a run brings. Here a
process that lasts executes the tasks with the *installed* fedsim; the bundle holds no code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.app import Context, Error, Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, run_from_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import NodeStatus, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClient, ProtobufClientInterceptor
from flwr.supercore.retry.retry_invoker import RetryInvoker, exponential
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedsim.federation.network.link import Link
from fedsim.system import paths
from fedsim.types import FedsimError

VERSIONS = ("1.41",)
"""Versions of Flower on which these internals were tried."""

# What a gate answers to all but nodes.
_NOT_FLEET = "not the Fleet API"
_GATE_HINT = "this is a gate, for nodes alone: name the SuperLink's own address"
REFUSED = f"[code: {int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)}]"
"""Text in a SuperNode's log when the SuperLink does not let it in. Its key is not registered, or
another node has the key; Flower does not say which."""

ANSWER_BYTES = 2**24
"""Most bytes of an answer that holds no tensors."""
# Bytes added for each object of an answer, so that many empty ones are bounded, too.
_OBJECT_BYTES = 256
_POLL_SECONDS = 0.05
# How often a run is started whose task another executor takes.
_STARTS = 3
# How long a SuperLink may take to offer the task of a run that it has started.
_CLAIM_SECONDS = 15.0
# Seconds between two tries to reach a SuperLink that is away.
_MOST_DELAY = 5
# Statuses of HTTP after which a request is tried again.
_PASSING = (502, 503, 504)
_REASON = 500
# What a SuperLink says of a key that is registered, or that was.
_IN_USE = "Public key already in use"

_BUNDLE = """\
[project]
name = "fedsim-run"
version = "1.0.0"
description = "A run of fedsim, executed by the fedsim that is installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedsim"

[tool.flwr.app.components]
serverapp = "fedsim_run:server"
clientapp = "fedsim_run:client"

[tool.flwr.app.config]
version = ""
scenario = ""
stack = ""
run = ""
held = ""
"""
_NO_CODE = '''\
"""Nothing: executors of fedsim run what is installed."""

server = client = None
'''


class _BoundedGrid(HttpGrid):
    """Grid of Flower's that reads at most `most_bytes` bytes of one answer."""

    most_bytes = ANSWER_BYTES

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._thread = threading.local()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the answers; one that is too large, or not sent whole, is an error message."""
        pulled: list[Message] = []
        for one in message_ids:
            client, budget = self._runtime_client, _Budget(self.most_bytes)

            # Threads that pull go on for a while after their answer was given up.
            def pull(
                request: PullObjectRequest,
                client: RuntimeHttpClient = client,
                budget: _Budget = budget,
            ) -> PullObjectResponse:
                self._thread.budget = budget
                return RuntimeHttpClient.PullObject(client, request)

            # Flower pulls in threads of its own: each learns here from which budget its bytes are
            # taken.
            client.PullObject = pull  # type: ignore[method-assign]
            pulled += super().pull_messages([one])
        return pulled

    def _connect(self) -> None:
        super()._connect()
        # Called once the headers are there, before the body is read.
        hooks = {"request": [], "response": [self._take]}
        self._runtime_client._client.event_hooks = hooks

    def _take(self, response: httpx.Response) -> None:
        if response.request.url.path.endswith("/pull-object"):
            # Without a length an object counts as more than the whole budget, and is refused.
            size = int(response.headers.get("content-length", self.most_bytes))
            self._thread.budget.take(size + _OBJECT_BYTES)


class _Budget:
    """Number of bytes that one answer may still have; several threads pull parts of it."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise ObjectPullError("", f"the answer has more than {self._most} bytes")


def check_version() -> None:
    """Refuses, by a FedsimError, a Flower that is none of `VERSIONS`, on which fedsim was tried."""
    found = importlib.metadata.version("flwr")
    if found.rpartition(".")[0] not in VERSIONS:
        raise FedsimError(
            f"federation.engine: deployment knows Flower {', '.join(VERSIONS)}.x, and {found} is "
            f"installed; run pip install 'flwr~={VERSIONS[-1]}.0'"
        )


def register(link: Link, public_key: bytes) -> bool:
    """Registers the owner of `public_key`, in OpenSSH's format, as a node at the SuperLink.

    It returns True if the node is new, and False if it was registered before. A FedsimError refuses
    what is no key, and a key whose node is unregistered for good, or says that the SuperLink fails.
    """
    try:
        key = load_ssh_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedsimError(
            "no public key in OpenSSH's format, which begins with ecdsa-sha2-nistp384"
        ) from error
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    client = _connect(ControlHttpClient, link, "flwr-cli")
    try:
        if client.RegisterNode(RegisterNodeRequest(public_key=pem)).node_id:
            return True
        raise FedsimError("the SuperLink registers no node, and does not say why; see its log")
    except httpx.HTTPError as error:
        said = _describe_error(error)
        # The answer is the same for a key in use and for one that was taken off: the list tells.
        if _IN_USE not in said:
            raise FedsimError(f"the SuperLink registers no node: {said}") from error
        known = client.ListNodes(ListNodesRequest()).nodes_info
        if any(node.public_key == pem and node.status != NodeStatus.UNREGISTERED for node in known):
            return False
        raise FedsimError(
            "the SuperLink has unregistered this key's node, and lets in no node with it again; "
            "make another key (ssh-keygen -t ecdsa -b 384)"
        ) from error
    finally:
        client.close()


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a node's ECDSA key (OpenSSH's format, without passphrase); others are a FedsimError."""
    try:
        key = load_ssh_private_key(paths.content(path, paths.TEXT), None)
    except (OSError, ValueError, TypeError) as error:
        raise FedsimError(f"--key: {path}: no private key in OpenSSH's format: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedsimError(f"--key: {path}: not ECDSA; make one with ssh-keygen -t ecdsa -b 384")
    return key


def deactivate(link: Link, key: ec.EllipticCurvePrivateKey, node: int) -> None:
    """Tells the SuperLink that the `node` (its number there) with this `key` is gone, if it can."""
    # Else the SuperLink would count the node as connected for a minute, and not let it in again.
    signer = NodeAuthHttpInterceptor(key, key.public_key())
    with _connect(FleetHttpClient, link, "SuperNode", signer) as client, suppress(httpx.HTTPError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node))


@contextmanager
def server_app(
    link: Link, config: Mapping[str, str], patience: float, most_bytes: int = ANSWER_BYTES
) -> Iterator[tuple[Grid, Context]]:
    """Starts a run with `config` on the SuperLink, and acts as its ServerApp in a `with` block.

    The block gets (grid, context). If the SuperLink refuses, is away, or lets another execute the
    run, a `FedsimError` says so.

    Args:
        link: Way to the SuperLink.
        config: The run's settings: `version` of `wire`, `scenario` as JSON, names of `stack` and
            `run`, and `held`, JSON of counts by client; the last three are empty for a census.
        patience: Seconds for which a SuperLink that is away is waited for.
        most_bytes: Size in bytes beyond which an answer becomes an error.
    """
    entitled = []
    if link.secret is not None:
        secret = paths.read_named(link.secret, "--superexec-secret", paths.TEXT)
        entitled.append(_entitle(secret))
    control = _connect(ControlHttpClient, link, "flwr-cli")
    runtime = _connect(
        RuntimeHttpClient, link, "flwr-serverapp", *entitled, retry=_retry_for(patience)
    )
    before = vars(TaskIdentity).copy()  # Flower keeps it by process, and another run may be there
    grid = None
    try:
        try:
            token = _start_run(control, runtime, config)
            grid = _BoundedGrid(
                link.superlink, link.roots is None, link.certificates(), token=token
            )
            grid._retry_invoker, grid.most_bytes = _retry_for(patience), most_bytes
            with _beating(grid._runtime_client), _reporting(grid) as context:
                yield grid, context
        except httpx.HTTPError as error:
            raise FedsimError(
                f"the SuperLink at {link.superlink} is away, or has forgotten this run: "
                f"{_describe_error(error)}; once it is back, continue with --resume"
            ) from error
    finally:
        for name in ("_task_id", "_run_id", "_node_id"):
            setattr(TaskIdentity, name, before[name])
        closing = [control.close, runtime.close, *([grid.close] if grid else [])]
        for close in closing:
            with suppress(Exception):
                close()


def answer_tasks(
    runtime: str,
    secret: bytes,
    answer: Callable[[Message, Context], Message],
    stop: threading.Event,
) -> None:
    """Answers a SuperNode's messages until `stop` is set or the SuperNode is gone.

    If an answer does not get through, the SuperNode waits for it for ever: a `FedsimError`.

    Args:
        runtime: Address of the SuperNode's runtime API on loopback, HOST:PORT.
        secret: Bytes that admit callers there.
        answer: Answers a message in its context; its exceptions become error messages.
        stop: Set from another thread to end the call after the present answer.
    """
    link = Link(superlink=runtime)
    with _connect(RuntimeHttpClient, link, "flwr-clientapp", _entitle(secret)) as client:
        while not stop.is_set():
            try:
                given = client.AcquireTask(
                    AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
                )
            # The SuperNode has ended, or ends; the caller watches it.
            except (httpx.HTTPStatusError, httpx.TransportError):
                return
            if not (given.HasField("task") and given.token):
                stop.wait(_POLL_SECONDS)
                continue
            try:
                _execute(link, given.token, answer)
            except Exception as error:  # Flower has several, for objects that did not get through
                raise FedsimError(
                    f"an answer did not get to the SuperNode: {type(error).__name__}: {error}"
                ) from error


def _execute(link: Link, token: str, answer: Callable[[Message, Context], Message]) -> None:
    own = RuntimeTokenHttpInterceptor(token)
    with _connect(RuntimeHttpClient, link, "flwr-clientapp", own) as client, _beating(client):
        message, context, _, _ = pull_task_input(client)
        status, why = SubStatus.COMPLETED, ""
        try:
            reply = answer(message, context)
        except Exception as error:  # a client may fail in any way, and its node goes on
            known = isinstance(error, FedsimError)
            why = (str(error) if known else f"{type(error).__name__}: {error}")[:_REASON]
            status = SubStatus.FAILED
            reply = Message(
                Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=why), reply_to=message
            )
        push_message(client, reply, context)
        push_task_output(client, context, status, why)


_Client = TypeVar("_Client", bound=ProtobufClient)


def _connect(
    kind: type[_Client],
    link: Link,
    component: str,
    *interceptors: ProtobufClientInterceptor,
    retry: RetryInvoker | None = None,
) -> _Client:
    """Returns a client of an API behind `link`, which poses as a `component` of Flower's."""
    version = RuntimeVersionHttpInterceptor(component_name=component)
    return kind.from_server_address(
        link.superlink,
        link.roots is None,
        link.certificates(),
        [version, *interceptors],
        retry_invoker=retry,
    )


def _entitle(secret: bytes) -> SuperExecAuthHttpInterceptor:
    methods = {"/flwr.proto.Runtime/AcquireTask"}
    return SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)


def _start_run(
    control: ControlHttpClient, runtime: RuntimeHttpClient, config: Mapping[str, str]
) -> str:
    bundle = _bundle()
    fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
    request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(config)))
    for _ in range(_STARTS):
        try:
            started = control.StartRun(request)
        except httpx.HTTPStatusError as error:
            raise FedsimError(f"the SuperLink starts no run: {_describe_error(error)}") from error
        if not started.HasField("run_id"):
            raise FedsimError("the SuperLink starts no run, and does not say why; see its log")
        if token := _claim(runtime, int(started.run_id)):
            return token
    raise FedsimError(
        "the SuperLink gave the run to another executor; start the SuperLink with --isolation "
        "process, and no other executor of ServerApps"
    )


def _bundle() -> bytes:
    files = {"pyproject.toml": _BUNDLE.encode(), "fedsim_run/__init__.py": _NO_CODE.encode()}
    content, _ = build_fab_from_files(files)
    return content


def _claim(runtime: RuntimeHttpClient, run: int) -> str | None:
    # A task is offered once, to whoever asks first: another run may have taken this one's.
    end = time.monotonic() + _CLAIM_SECONDS
    while time.monotonic() < end:
        try:
            given = runtime.AcquireTask(
                AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise FedsimError(
                    "--superexec-secret: the SuperLink lets only those execute tasks that have its "
                    "secret, and this is another one or none"
                ) from error
            raise
        if given.HasField("task") and given.token and given.task.run_id == run:
            return str(given.token)
        time.sleep(_POLL_SECONDS)
    return None


@contextmanager
def _beating(client: RuntimeHttpClient) -> Iterator[None]:
    # Where Flower has ended the task, its own heartbeat would interrupt this process; here the next
    # request about the task is refused, and says why.
    def tell() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            return error.response.status_code not in _PASSING
        return True

    beat = HeartbeatSender(tell)
    beat.start()
    try:
        yield
    finally:
        with suppress(Exception):
            beat.stop()


@contextmanager
def _reporting(grid: HttpGrid) -> Iterator[Context]:
    client = grid._runtime_client
    status, why = SubStatus.FAILED, "interrupted"
    try:
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        yield context_from_proto(given.context)
        status, why = SubStatus.COMPLETED, ""
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:_REASON]
        raise
    finally:
        # The run is over: a SuperLink that is away is not waited for to be told so.
        grid._retry_invoker.max_tries = 1
        with suppress(Exception):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=why))


def _retry_for(seconds: float) -> RetryInvoker:
    """Returns a retrier for `seconds`; Flower's own tries for ever, or interrupts this process."""

    def hopeless(error: Exception) -> bool:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in _PASSING
        # A certificate that is not accepted now is not accepted a few seconds later.
        return "certificate" in str(error).lower()

    return RetryInvoker(
        wait_gen_factory=lambda: exponential(max_delay=_MOST_DELAY),
        recoverable_exceptions=(httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=seconds,
        should_giveup=hopeless,
    )


def _describe_error(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        text = error.response.text[:_REASON].strip()
        hint = f"; {_GATE_HINT}" if text == _NOT_FLEET else ""
        return f"status {error.response.status_code} {text}{hint}".strip()
    return f"{type(error).__name__} {error}".strip()
