"""A real SuperLink on loopback, the nodes of a run, and somebody who listens between them."""

from __future__ import annotations

import itertools
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.cli.supernode.register import try_load_public_key
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsim.federation.network import flower
from fedsim.federation.network.flower import _BoundedGrid
from fedsim.federation.network.keys import _make_certificates, _make_node_key
from fedsim.federation.network.link import Link
from fedsim.federation.network.superlink import Child
from fedsim.system.addresses import address_of, split

NEVER = 600.0
"""Seconds after which a test gives up; a busy machine takes minutes for what takes none."""
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_LOG_LEVEL": "DEBUG",  # a SuperLink then logs every request
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until(condition: Any, what: str) -> Any:
    """The first true value of `condition()`."""
    end = time.monotonic() + NEVER
    while not (value := condition()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)
    return value


@contextmanager
def process(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs one of Flower's commands, its output in `folder`."""
    home = folder / f"{name}-home"
    program = Path(sys.prefix) / "bin" / command[0]
    module = {"flower-superlink": "superlink", "flower-supernode": "supernode"}[command[0]]
    start = f"from flwr.{module}.cli import {command[0].replace('-', '_')} as m; m()"
    words = [str(program)] if program.exists() else [sys.executable, "-c", start]
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen(
            [*words, *command[1:]],
            stdout=log,
            stderr=log,
            env={**os.environ, **ENVIRONMENT, "FLWR_HOME": str(home)},
        )
    with ending(running):
        yield running


@contextmanager
def ending(running: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a process with the block."""
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@dataclass(frozen=True)
class Authority:
    """The folder of certificates of a server."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def server_certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"


def make_authority(folder: Path, hosts: list[str], *, days: int = 2) -> Authority:
    folder.mkdir(parents=True)
    for name, content in _make_certificates(hosts, days=days).items():
        (folder / name).write_bytes(content)
    return Authority(folder)


def write_node_key(path: Path) -> Path:
    """Writes a node's key; returns the path of the public one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    public = path.with_name(path.name + ".pub")
    for file, content in zip((path, public), _make_node_key(), strict=True):
        file.write_bytes(content)
    return public


@contextmanager
def gate(
    authority: Authority, superlink: str, log: Path, /, **changes: object
) -> Iterator[tuple[str, Child]]:
    """The address of a gate that logs to `log`, and its process; `changes` are of its options."""
    options = {
        "listen": "127.0.0.1:0",
        "superlink": superlink,
        "certificate": authority.server_certificate,
        "key": authority.server_key,
        "roots": authority.certificate,
        "log": log,
        **changes,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    command = [sys.executable, "-m", "fedsim.federation.network.gate", *words]
    running = Child(command, log.with_suffix(".out"))
    try:
        running.await_words("gate at ", "the gate")
        yield running.words().split()[-1], running
    finally:
        running.stop()


@dataclass
class SuperLink:
    """A SuperLink, and what a client of it needs; without an authority it speaks plaintext."""

    address: str
    authority: Authority | None = None
    secret: Path | None = None

    @property
    def roots(self) -> bytes | None:
        return self.authority.certificate.read_bytes() if self.authority else None

    def connect(self, client: Any, *more: Any, address: str = "") -> Any:
        return client.from_server_address(
            server_address=address or self.address,
            insecure=self.authority is None,
            root_certificates=self.roots,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-cli"), *more],
        )

    def register(self, public: Path) -> int:
        with self.connect(ControlHttpClient) as control:
            key = try_load_public_key(public)
            return int(control.RegisterNode(RegisterNodeRequest(public_key=key)).node_id)

    def fleet(self, key: Path, address: str = "", *more: Any) -> Any:
        """A client of the Fleet API that signs with `key`."""
        private = node_key(key)
        signer = NodeAuthHttpInterceptor(private, private.public_key())
        return self.connect(FleetHttpClient, signer, *more, address=address)

    @contextmanager
    def run(self) -> Iterator[_BoundedGrid]:
        """Starts a run and plays its ServerApp."""
        roots = self.authority.certificate if self.authority else None
        link = Link(superlink=self.address, roots=roots, secret=self.secret)
        config = dict.fromkeys(("version", "scenario", "stack", "run", "held"), "")
        with flower.server_app(link, config, NEVER) as (grid, _):
            assert isinstance(grid, _BoundedGrid)
            yield grid

    @contextmanager
    def node(self, key: Path | None, address: str = "") -> Iterator[Node]:
        """Plays a node, by what `flower-supernode` itself calls."""
        keys = None
        if key:
            private = node_key(key)
            keys = private, private.public_key()
        with http_request_response(
            address or self.address, self.authority is None, self.roots, keys
        ) as calls:
            yield Node(*calls)


class Node:
    """A node that pulls orders and pushes replies."""

    def __init__(self, identifier: int, *calls: Any) -> None:
        self.identifier = identifier
        self._receive, self._send, _, _, self._pull, self._push, self._confirm = calls

    def pull(self) -> Message:
        """The next order."""
        bare, tree = until(self._receive, "an order")
        run = bare.metadata.run_id
        contents = {
            part.object_id: self._pull(run, part.object_id) for part in iterate_object_tree(tree)
        }
        self._confirm(run, tree.object_id)
        message = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = bare.metadata.message_id
        return message

    def push(self, message: Message) -> None:
        """Pushes a reply and its objects, of which the SuperLink says which it has not."""
        message.metadata.__dict__["_message_id"] = message.object_id
        run = message.metadata.run_id
        objects = get_all_nested_objects(message)
        wanted, session = self._send(message, get_object_tree(message), 1.0)
        for identifier, part in objects.items():
            if identifier in wanted:
                self._push(run, session, identifier, part.deflate())


@contextmanager
def superlink(
    folder: Path, authority: Authority | None = None, secret: Path | None = None
) -> Iterator[SuperLink]:
    """A SuperLink that authenticates nodes if there is an authority for TLS."""
    port = free_port()
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    command += ["--database", str(folder / "superlink.db")]
    if authority:
        command += ["--ssl-ca-certfile", str(authority.certificate)]
        command += ["--ssl-certfile", str(authority.server_certificate)]
        command += ["--ssl-keyfile", str(authority.server_key), "--enable-supernode-auth"]
    else:
        command += ["--insecure"]
    if secret:
        command += ["--superexec-auth-secret-file", str(secret)]
    with ExitStack() as stack:
        running = stack.enter_context(process(command, folder, "superlink"))
        link = SuperLink(f"127.0.0.1:{port}", authority, secret)
        scheme = "https" if authority else "http"
        verify: Any = False

        def answers() -> bool:
            assert running.poll() is None, (folder / "superlink.log").read_text()
            try:
                health = f"{scheme}://{link.address}/health"
                return httpx.get(health, verify=verify, timeout=NEVER).status_code > 0
            except httpx.TransportError:
                return False

        until(answers, "the SuperLink answers")
        yield link


def node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


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
