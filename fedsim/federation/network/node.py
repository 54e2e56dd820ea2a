"""A node: Flower's SuperNode and the process that computes for it, watched as one.

The SuperNode speaks with the SuperLink and knows nothing of data. This process holds data, torch
and models from one message to the next, and asks it for work over loopback.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fedsim.federation.network import flower, link
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.superlink import Child, free_port, program
from fedsim.recording.files import remove_torn
from fedsim.types import FedsimError

_RETRY_SECONDS = 3.0
"""Between two tries to join: the SuperLink refuses a node that came back while it still counts it
as there, for about a minute."""
_JOIN_SECONDS = 150.0
"""After so long without being let in, the node gives up."""
_JOINED = "SuperNode ID"
"""What a SuperNode writes once the SuperLink has let it in."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How a node takes part in federations."""

    superlink: str
    """HOST:PORT of the SuperLink, or of the gate in front of it."""
    roots: Path | None
    """Certificates of authorities; None: no TLS, on loopback."""
    key: Path | None
    """The node's private key (ECDSA P-384, OpenSSH); None where the SuperLink asks for none."""
    home: Path
    """The node's own folder."""


def serve(
    app: NodeApp, member: Membership, say: Callable[[str], None], stop: threading.Event
) -> None:
    """Answer what the SuperLink asks until `stop` is set; join again whenever the link breaks.

    Raises:
        FedsimError: the SuperLink is not reachable or not safe at the start, or lets this node not
            in for minutes.
    """
    flower.check_version()
    link.check(member.superlink, member.roots)
    if member.key is not None and member.roots is None:
        raise FedsimError("--key: a node shows its key over TLS only; give --root-certificates")
    member.home.mkdir(parents=True, exist_ok=True)
    remove_torn(member.home)
    joined = time.monotonic()
    while not stop.is_set():
        child, runtime, secret = _supernode(member)
        try:
            if _let_in(child, stop):
                joined = time.monotonic()
                say(f"joined {member.superlink}")
                _serve(child, runtime, secret, app, stop)
            words = child.last_words()
        finally:
            child.stop()
        if stop.is_set():
            return
        if time.monotonic() - joined > _JOIN_SECONDS:
            raise FedsimError(
                f"{member.superlink} lets this node not in: its key is not registered, another "
                f"node has it, or it is away; the SuperNode's last words: {words}"
            )
        say("not joined; trying again")
        stop.wait(_RETRY_SECONDS)


def until_told() -> threading.Event:
    """Return an event that SIGINT, SIGTERM and SIGHUP set."""
    stop = threading.Event()

    def told(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, told)
    return stop


def _supernode(member: Membership) -> tuple[Child, str, bytes]:
    """Start a SuperNode; return it, the address of its Runtime API, and the secret of that."""
    port, secret = free_port(), secrets.token_bytes(32)
    path = member.home / "runtime.secret"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(secret)
    command = [
        program("flower-supernode"),
        *("--superlink", member.superlink),
        *("--isolation", "process", "--host", "127.0.0.1", "--port", str(port)),
        *("--superexec-auth-secret-file", str(path)),
    ]
    command += (
        ["--insecure"] if member.roots is None else ["--root-certificates", str(member.roots)]
    )
    if member.key is not None:
        command += ["--auth-supernode-private-key", str(member.key)]
    log = member.home / "supernode.log"
    log.unlink(missing_ok=True)
    child = Child(command, log)
    return child, f"127.0.0.1:{port}", secret


def _let_in(child: Child, stop: threading.Event) -> bool:
    """Wait until the SuperLink has let the SuperNode in; whether it has."""
    while child.status is None and not stop.is_set():
        if _JOINED in child.last_words():
            return True
        stop.wait(0.1)
    return False


def _serve(child: Child, runtime: str, secret: bytes, app: NodeApp, stop: threading.Event) -> None:
    """Compute for the SuperNode until it ends or `stop` is set."""
    ended = threading.Event()

    def watch() -> None:
        while child.status is None and not stop.is_set():
            stop.wait(0.2)
        ended.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    while not ended.is_set():
        flower.serving(runtime, secret, app, ended)
    watcher.join()
