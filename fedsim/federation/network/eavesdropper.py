"""Somebody on the wire between nodes and a SuperLink: a proxy that notes what passes.

Of TLS that is who sends how much, and when. Of plaintext it is everything, and `overheard` reads
the updates from it. Nothing is changed on the way.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fedsim.federation.network.addresses import address_of, listener, split
from fedsim.system import processes

Direction = Literal["to_server", "to_client"]

PASSAGES = "passages.jsonl"
_CHUNK_BYTES = 64 * 1024
_TLS_HANDSHAKE = b"\x16\x03"
"""What TLS starts with: a record of the handshake, of version 3."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Describes bytes that passed together."""

    connection: int
    """Connections are numbered from 1."""
    time: float
    """Seconds since 1970."""
    direction: Direction
    size: int
    """Bytes."""
    tls: bool
    """Whether the connection is encrypted."""


class Eavesdropper:
    """A proxy on loopback in front of `target`, in a process that ends with the block.

    It writes a line for each `Passage` into the folder `capture`; with `keep_bytes` also the bytes
    of each connection, for `overheard.updates`. `address` is where nodes are to connect to.
    """

    def __init__(
        self, listen: str, target: str, capture: Path, *, keep_bytes: bool = False
    ) -> None:
        self._listen, self._target = listen, target
        self._capture, self._keep_bytes = capture, keep_bytes
        self._stack = ExitStack()

    def __enter__(self) -> Eavesdropper:
        """Listens, then starts the process.

        Raises:
            FedsimError: the address is taken or not on loopback, or the capture exists.
        """
        from fedsim.types import FedsimError  # which imports torch: not for the proxy's process

        try:
            host, _ = split(self._listen)
            if not ipaddress.ip_address(host).is_loopback:
                raise ValueError("it may listen on loopback alone")
            self._capture.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(self._capture.iterdir()):
                raise ValueError(f"{self._capture} is not empty")
            server = listener(self._listen)
        except (OSError, ValueError) as error:
            raise FedsimError(
                f"the eavesdropper at {self._listen} cannot start: {error}; name a free address "
                "like 127.0.0.1:0, and a new folder"
            ) from error
        with server:
            self.address = address_of(server)
            arguments = (server, self._target, self._capture, self._keep_bytes)
            self._stack.enter_context(processes.child(_in_child, *arguments))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def passages(capture: Path) -> list[Passage]:
    """What passed, in the order of time."""
    lines = (capture / PASSAGES).read_text(encoding="utf-8").splitlines()
    return [Passage(**json.loads(line)) for line in lines]


def stored(capture: Path, connection: int, direction: Direction) -> Path:
    """Where the bytes of a connection are, if they were kept."""
    return capture / f"{connection}.{direction}"


class _Proxy:
    """Accepts connections and notes what passes on each."""

    def __init__(self, target: str, capture: Path, keep_bytes: bool, notes: io.FileIO) -> None:
        self._target, self._capture = target, capture
        self._keep_bytes, self._notes = keep_bytes, notes
        self._connections = 0

    async def run(self, server: socket.socket) -> None:
        """Passes bytes on until it is cancelled."""
        async with await asyncio.start_server(self._connect, sock=server) as running:
            await running.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        try:
            onward = await asyncio.open_connection(*split(self._target))
        except OSError:
            writer.close()
            return
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await asyncio.gather(
            self._pass_on(connection, "to_server", reader, onward[1], first),
            self._pass_on(connection, "to_client", onward[0], writer, first),
        )
        for end in (writer, onward[1]):
            end.close()

    async def _pass_on(
        self,
        connection: int,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        first: asyncio.Future[bytes],
    ) -> None:
        """Passes one direction on until its end; `first` becomes the first bytes of either."""
        with ExitStack() as stack:
            kept = None
            if self._keep_bytes:
                kept = stack.enter_context(_create(stored(self._capture, connection, direction)))
            with suppress(OSError):
                while data := await source.read(_CHUNK_BYTES):
                    if not first.done():
                        first.set_result(data)
                    passage = Passage(
                        connection=connection,
                        time=time.time(),
                        direction=direction,
                        size=len(data),
                        tls=first.result().startswith(_TLS_HANDSHAKE),
                    )
                    self._notes.write(json.dumps(asdict(passage)).encode() + b"\n")
                    if kept:
                        kept.write(data)
                    sink.write(data)
                    await sink.drain()
        with suppress(OSError):
            sink.write_eof()


def _create(path: Path) -> io.FileIO:
    """Opens a new file that only its owner may read; what is written is there at once."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def _in_child(server: socket.socket, target: str, capture: Path, keep_bytes: bool) -> None:
    with _create(capture / PASSAGES) as notes:
        asyncio.run(_Proxy(target, capture, keep_bytes, notes).run(server))
