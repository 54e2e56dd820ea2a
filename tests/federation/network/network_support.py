"""A real SuperLink on loopback, the nodes of a run, and somebody who listens between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flwr
import pytest
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

from fedsim.federation.network import flower, superlink
from fedsim.federation.network.flower import _BoundedGrid
from fedsim.federation.network.keys import _make_certificates
from fedsim.federation.network.link import Link
from fedsim.federation.network.superlink import Child, free_port

NEVER = 600.0
"""Seconds after which a test gives up; a busy machine takes minutes for what takes none."""


def until(condition: Any, what: str) -> Any:
    """The first true value of `condition()`."""
    end = time.monotonic() + NEVER
    while not (value := condition()):
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)
    return value


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
    """A SuperLink, and what a client of it needs."""

    address: str
    authority: Authority

    @property
    def roots(self) -> bytes:
        return self.authority.certificate.read_bytes()

    def connect(self, client: Any, *more: Any, address: str = "") -> Any:
        return client.from_server_address(
            server_address=address or self.address,
            insecure=False,
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
        secret = self.authority.folder / "superexec.secret"
        link = Link(superlink=self.address, roots=self.authority.certificate, secret=secret)
        config = dict.fromkeys(("version", "scenario", "stack", "run", "held"), "")
        with flower.server_app(link, config, NEVER) as (grid, _):
            assert isinstance(grid, _BoundedGrid)
            yield grid

    @contextmanager
    def node(self, key: Path, address: str = "") -> Iterator[Node]:
        """Plays a node, by what `flower-supernode` itself calls."""
        private = node_key(key)
        with http_request_response(
            address or self.address, False, self.roots, (private, private.public_key())
        ) as calls:
            yield Node(*calls)


class Node:
    """A node that pulls orders and pushes replies."""

    def __init__(self, identifier: int, *calls: Any) -> None:
        self.identifier = identifier
        self._receive, self._send, _, _, self._pull, self._push, self._confirm = calls

    def pull(self) -> Message:
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


def flower_program(name: str) -> str:
    """Beside Flower, which may be installed in another environment than this Python's."""
    return str(Path(flwr.__file__).parents[4] / "bin" / name)


@contextmanager
def running_superlink(folder: Path) -> Iterator[SuperLink]:
    """A SuperLink with the keys in `folder`, as `fedsim keys` makes them."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(superlink, "program", flower_program)
        running = superlink.superlink(folder, port, folder / "superlink.log")
    try:
        running.await_port(port)
        yield SuperLink(f"127.0.0.1:{port}", Authority(folder))
    finally:
        running.stop()


def node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key
