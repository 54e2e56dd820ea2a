"""A node: Flower's SuperNode and the process that computes for it, watched as one.

This process holds data and models, and asks the SuperNode for work over loopback.
"""

from __future__ import annotations

import re
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsim.federation.network import flower, link
from fedsim.federation.network.home import make_private
from fedsim.federation.network.link import Link
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.superlink import Child, free_port, program
from fedsim.recording.files import remove_torn
from fedsim.system import paths
from fedsim.system.lock import lock_folder
from fedsim.types import FedsimError, RunFailed

# Rest between two tries to join.
_RETRY_SECONDS = 3.0
# How long one try may take: Flower's programs go on for ever while a SuperLink is away.
_LET_IN_SECONDS = 30.0
# After so long without being let in, the node gives up. A SuperLink refuses a node that lost its
# folder, and so cannot say that it left, for a minute.
_JOIN_SECONDS = 90.0
# What a SuperNode writes once the SuperLink has let it in.
_LET_IN = re.compile(r"SuperNode ID: (\d+)\s")
JOINED = "joined"
"""Word before the SuperLink's address in the line that a node prints once it is let in."""
# File in the node's folder that holds its number at the SuperLink.
_NODE = "node.id"


@dataclass(frozen=True, kw_only=True)
class NodeMembership:
    """Settings by which a node takes part in federations."""

    superlink: str
    """HOST:PORT of the SuperLink, or of the gate in front of it."""
    roots: Path | None
    """File of certificates that may vouch for the SuperLink (PEM); None: no TLS, on loopback."""
    key: Path | None
    """The node's private key (ECDSA P-384, OpenSSH); None where the SuperLink asks for none."""
    home: Path
    """The node's own folder, see the module `home`."""


def serve(
    app: NodeApp, member: NodeMembership, say: Callable[[str], None], stop: threading.Event
) -> None:
    """Answers the SuperLink's messages until `stop` is set; joins again whenever the link breaks.

    A `RunFailed` says that the SuperLink has not let this node in for a minute and a half, and a
    `FedsimError` all that is wrong before.

    Args:
        app: Answers each message.
        member: How the node takes part.
        say: Called with lines of text, no newline, for the node's owner.
        stop: Set from another thread, or by a signal (`until_told`), to end the call.
    """
    flower.check_version()
    app.refuse_missing_data()
    app.refuse_other_identity()
    link.check(member.superlink, member.roots)
    if member.key is not None:
        flower.private_key(member.key)
        if member.roots is None:
            raise FedsimError("--key: a node shows its key over TLS only; give --root-certificates")
    make_private(member.home)
    with lock_folder(member.home, "--home"):
        remove_torn(member.home)
        _take_part(app, member, say, stop)


def _take_part(
    app: NodeApp, member: NodeMembership, say: Callable[[str], None], stop: threading.Event
) -> None:
    said = ""
    out_since = time.monotonic()
    while not stop.is_set():
        joined, why = _session(app, member, say, stop)
        if stop.is_set():
            return
        if joined:  # only time without a link counts against the limit
            out_since = time.monotonic()
        if time.monotonic() - out_since > _JOIN_SECONDS:
            raise RunFailed(
                f"{member.superlink} has not let this node in for {_JOIN_SECONDS:.0f} s: {why}"
            )
        if joined or why != said:
            _tell(say, f"not joined: {why}; trying again")
            said = why
        stop.wait(_RETRY_SECONDS)


def _session(
    app: NodeApp, member: NodeMembership, say: Callable[[str], None], stop: threading.Event
) -> tuple[bool, str]:
    """Joins and answers until the link breaks; returns whether it joined, and why it is out now."""
    try:
        link.check(member.superlink, member.roots)
        _leave(member)
    except FedsimError as error:
        return False, str(error)
    child, runtime, secret = _supernode(member)
    try:
        node = _let_in(child, stop)
        if node is not None:
            with suppress(OSError):  # it is only to come back sooner
                (member.home / _NODE).write_text(str(node))
            _tell(say, f"{JOINED} {member.superlink}")
            try:
                _serve(child, runtime, secret, app, stop)
            except FedsimError as error:
                return True, str(error)
            return True, "the link broke"
        if clock := link.clock_error(member.superlink, member.roots):
            return False, clock
        if flower.REFUSED in child.words():
            return False, (
                "the SuperLink refuses its key: it is not registered, or another node that is "
                "there has it"
            )
        return False, f"the SuperNode's last words: {child.last_words()}"
    finally:
        child.stop()


def _leave(member: NodeMembership) -> None:
    """Tells the SuperLink that the last SuperNode of this folder, perhaps killed, is gone."""
    path = member.home / _NODE
    if member.key is None or not path.exists():
        return
    number = paths.text(path, paths.TEXT)
    if number.isdecimal():
        key = flower.private_key(member.key)
        flower.deactivate(Link(superlink=member.superlink, roots=member.roots), key, int(number))


def _tell(say: Callable[[str], None], line: str) -> None:
    with suppress(OSError):  # a full disk behind it does not end the node
        say(line)


def until_told() -> threading.Event:
    """Returns an event that SIGINT, SIGTERM and SIGHUP set from now on; for the main thread."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _supernode(member: NodeMembership) -> tuple[Child, str, bytes]:
    port, secret = free_port(), secrets.token_bytes(32)
    path = member.home / "runtime.secret"
    path.unlink(missing_ok=True)
    # Private before the secret is in it.
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


def _let_in(child: Child, stop: threading.Event) -> int | None:
    """Waits until the SuperLink has let the SuperNode in; returns its number there, or None."""
    end = time.monotonic() + _LET_IN_SECONDS
    while child.status is None and not stop.is_set() and time.monotonic() < end:
        if found := _LET_IN.search(child.words()):
            return int(found[1])
        stop.wait(0.1)
    return None


def _serve(child: Child, runtime: str, secret: bytes, app: NodeApp, stop: threading.Event) -> None:
    ended = threading.Event()

    def watch() -> None:
        while child.status is None and not stop.is_set():
            child.bound_log()
            stop.wait(0.2)
        ended.set()

    # A thread of its own, since `answer_tasks` is busy while it computes an answer.
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    while not ended.is_set():
        flower.answer_tasks(runtime, secret, app, ended)
    watcher.join()
