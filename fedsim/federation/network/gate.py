"""A gate in front of a SuperLink: nodes reach its Fleet API, and nothing else on that port.

A SuperLink serves three APIs on one port, and authenticates nodes on one of them: whoever reaches
the port can start runs on the other two. The gate ends a node's TLS, passes on what `admission`
lets pass in a request of its own making, over TLS of its own, and refuses all else. Its process is
kept small (torch is not imported), since it stands where strangers can reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import ssl
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import formatdate
from functools import partial
from ipaddress import IPv6Network
from logging.handlers import RotatingFileHandler
from pathlib import Path

import h11

from fedsim.federation.network.admission import BODY_LIMIT, Refusal, Signatures
from fedsim.federation.network.passage import CHUNK_BYTES, Passage, Side, SuperLink
from fedsim.system import addresses

# Most connections at once; a node has two, and one more for each core while it pushes.
_CONNECTIONS = 1024
# A node, or the strangers of one address, may have one in so many of the connections.
_PARTY_SHARE = 8
# Size at which a log begins anew; the full one stays beside it until the next time.
_LOG_BYTES = 8 * 2**20
# Most lines of the log for one caller, and for all strangers, within so many seconds.
_CALLER_LINES, _STRANGERS_LINES, _LINES_SECONDS = 200, 2000, 3600

_STRANGERS = "strangers"
_HANDSHAKE_SECONDS = 10.0
# Time in which a refused client may go on sending: cut off, it would not read the reason.
_LINGER_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class _GateSettings:
    superlink: str
    """Address of the SuperLink, HOST:PORT; its certificate must name this host."""
    certificate: Path
    key: Path
    roots: Path
    """Certificate of the authority that vouches for the SuperLink."""
    body_limit: int
    connections: int


class _Server:
    def __init__(self, settings: _GateSettings, since: float, log: logging.Handler) -> None:
        self._settings, self._log = settings, log
        self._signatures = Signatures(since)
        inside, self._outside = _contexts(settings)
        self._superlink = SuperLink(settings.superlink, inside)
        self._callers: dict[asyncio.Task[None], _Caller] = {}  # in order of arrival
        self._lines = _Lines()

    async def run(self, server: socket.socket) -> None:
        server.setblocking(False)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        while True:
            try:
                connection, peer = await loop.sock_accept(server)
            except OSError as error:  # out of files, or the client has gone
                self._log_refusal(_Caller("-"), Refusal(503, str(error)), "")
                # Where files have run out, trying again at once would only burn the processor.
                await asyncio.sleep(0.1)
                continue
            caller = _Caller(f"{peer[0]}:{peer[1]}", _network(peer[0]))
            self._make_room(caller)
            served = loop.create_task(self._serve(connection, caller))
            self._callers[served] = caller
            served.add_done_callback(lambda served: self._callers.pop(served, None))

    def _make_room(self, newcomer: _Caller) -> None:
        """Ends the oldest connection of the strangers who hold most, if there are too many."""
        # A node shows by its first request that it is one; a stranger that only waits gives way.
        held = Counter(caller.of for caller in self._callers.values() if caller.is_stranger)
        if held[newcomer.of] >= self._share:
            self._end_oldest(newcomer.of)
        # The busiest network gives way, so that no single address crowds out the rest.
        elif held and len(self._callers) >= self._settings.connections:
            self._end_oldest(max(held, key=lambda of: held[of]))

    def _admit(self, caller: _Caller, key: bytes) -> None:
        if caller.of == key:
            return
        # Nodes leave a share of the connections to strangers, since every node begins as one.
        held = Counter(other.of for other in self._callers.values() if not other.is_stranger)
        is_full = held.total() >= max(1, self._settings.connections - self._share)
        # `max` takes the first of equals: at a tie the newcomer is refused, and nobody else ended.
        busiest = max([key, *held], key=lambda of: held[of])
        if held[key] >= self._share or (is_full and busiest == key):
            raise Refusal(503, "too many connections of one node")
        if is_full:
            self._end_oldest(busiest)
        caller.of = key

    @property
    def _share(self) -> int:
        return max(1, self._settings.connections // _PARTY_SHARE)

    def _end_oldest(self, of: str | bytes) -> None:
        task, caller = next(item for item in self._callers.items() if item[1].of == of)
        # At once: the task ends later, and must not be counted or chosen again until then.
        del self._callers[task]
        task.cancel()
        self._log_refusal(caller, Refusal(503, "too many connections: the oldest is ended"), "")

    async def _serve(self, connection: socket.socket, caller: _Caller) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._outside,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
        except asyncio.CancelledError:
            connection.close()
            raise
        except OSError as error:  # of TLS, too; a probe that only connects is no request
            said = str(error) or type(error).__name__
            self._log_refusal(caller, Refusal(400, f"no TLS: {said}"), "")
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        client = Side(reader, writer, h11.SERVER)
        limit = self._settings.body_limit
        admit = partial(self._admit, caller)
        passage = Passage(client, self._superlink, self._signatures, limit, admit)
        is_ended = False
        try:
            while await passage.exchange():
                pass
        except asyncio.CancelledError:
            is_ended = True
            raise
        except Refusal as refusal:
            await self._refuse(passage, caller, refusal)
        except h11.RemoteProtocolError as error:
            await self._refuse(passage, caller, Refusal(error.error_status_hint, str(error)))
        except (OSError, h11.LocalProtocolError) as error:
            if passage.request:  # who only connects, to look at the certificate, asks for nothing
                self._log_refusal(caller, Refusal(400, f"broke off: {error}"), passage.request)
        finally:
            await passage.close(at_once=is_ended)

    async def _refuse(self, passage: Passage, caller: _Caller, refusal: Refusal) -> None:
        self._log_refusal(caller, refusal, passage.request)
        if passage.is_answered:
            return
        body = f"{refusal}\n".encode()
        headers = [("content-length", str(len(body))), ("content-type", "text/plain")]
        headers += [("connection", "close"), ("date", formatdate(usegmt=True))]
        answer = h11.Response(status_code=refusal.status, headers=headers)
        with suppress(OSError, TimeoutError, h11.ProtocolError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await passage.client.send(answer)
                await passage.client.send(h11.Data(data=body))
                await passage.client.send(h11.EndOfMessage())
                await passage.client.discard()

    def _log_refusal(self, caller: _Caller, refusal: Refusal, request: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        # Escaped, so that a client cannot forge lines of the log.
        what = f"{refusal.status} {ascii(str(refusal))[1:-1]}: {request or '-'}"
        if dropped := self._lines.begin():
            self._write(f"{now} - {dropped} refusals before this have no line")
        if self._lines.allow(caller):
            self._write(f"{now} {caller.who} {what}")

    def _write(self, line: str) -> None:
        # A handler raises nothing: a full disk behind the log does not close the gate.
        self._log.handle(logging.makeLogRecord({"msg": line}))


@dataclass(eq=False)
class _Caller:
    who: str
    """Address and port of the caller, for the log."""
    of: str | bytes = ""
    """Key of a node (bytes), or network of a stranger (text)."""

    @property
    def is_stranger(self) -> bool:
        return isinstance(self.of, str)


class _Lines:
    def __init__(self) -> None:
        self._since, self._dropped = time.monotonic(), 0
        self._written: Counter[str | bytes] = Counter()

    def begin(self) -> int:
        """Begins a new hour of counting if it is time; returns how many lines the old dropped."""
        if time.monotonic() - self._since < _LINES_SECONDS:
            return 0
        dropped, self._dropped = self._dropped, 0
        self._since = time.monotonic()
        self._written.clear()
        return dropped

    def allow(self, caller: _Caller) -> bool:
        is_full = caller.is_stranger and self._written[_STRANGERS] >= _STRANGERS_LINES
        if is_full or self._written.get(caller.of, 0) >= _CALLER_LINES:
            self._dropped += 1
            return False
        self._written.update([caller.of, *([_STRANGERS] if caller.is_stranger else [])])
        return True


def _network(address: str) -> str:
    """Returns the network that a stranger is counted by: of an IPv6 address its /64."""
    return (
        address if ":" not in address else str(IPv6Network((address.partition("%")[0], 64), False))
    )


def _contexts(settings: _GateSettings) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outside.load_cert_chain(settings.certificate, settings.key)
    # This protocol verifies the certificate and its host by default.
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    inside.load_verify_locations(settings.roots)
    return inside, outside


def main() -> None:
    """Runs a gate until SIGINT or SIGTERM, with the options of `sys.argv` (see `--help`).

    It prints `gate at HOST:PORT` once it listens. Wrong options or files are a SystemExit (2).
    """
    parser = argparse.ArgumentParser(prog="python -m fedsim.federation.network.gate")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    for name in ("--certificate", "--key", "--roots"):
        parser.add_argument(name, required=True, type=Path, metavar="FILE")
    parser.add_argument("--body-limit", type=int, default=BODY_LIMIT, metavar="BYTES")
    parser.add_argument("--connections", type=int, default=_CONNECTIONS, metavar="N")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="of refusals; default: standard error"
    )
    given = vars(parser.parse_args())
    listen, log = given.pop("listen"), given.pop("log")
    settings = _GateSettings(**given)
    try:
        # What is wrong with the files shows here, and not at the first connection.
        _contexts(settings)
        addresses.split(settings.superlink)
        server, since = addresses.listener(listen), time.time()
        # Two files bound the whole: what was older still is lost.
        file = log and RotatingFileHandler(log, maxBytes=_LOG_BYTES, backupCount=1)
    except (OSError, ValueError) as error:
        parser.error(f"{error}; check address, certificate, key, roots and log")
    logging.raiseExceptions = False  # where the log has no room, standard error may have none
    print(f"gate at {addresses.address_of(server)}", flush=True)
    with server, suppress(asyncio.CancelledError):
        log_to = file or logging.StreamHandler()
        asyncio.run(_Server(settings, since, log_to).run(server))


if __name__ == "__main__":
    main()
