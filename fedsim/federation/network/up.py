"""A whole federation on this machine: authority, keys, SuperLink, gate and nodes, thrown away.

    OUT/nodes/node-0/   the folder of the node that is client 0: secret, truth, log
    OUT/network/        what the SuperLink and the gate say

Keys and database live in a temporary folder that is gone when the block ends.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedsim.federation.network import flower
from fedsim.federation.network.home import make_private
from fedsim.federation.network.keys import KEY_NAME, PEERS_NAME, make_keys
from fedsim.federation.network.link import SCENARIO, Link
from fedsim.federation.network.node import JOINED
from fedsim.federation.network.superlink import Child, free_port, superlink
from fedsim.system.processes import scratch
from fedsim.types import FedsimError

_HOST = "127.0.0.1"
_WATCH_SECONDS = 0.5
# Seconds before a node that has ended is started again.
_NODE_REST = 1.0
# The status of a program whose input was refused; it would be again.
_REFUSED = 2


@dataclass(frozen=True, kw_only=True)
class RunningFederation:
    """A federation that runs on this machine, with handles on its processes."""

    link: Link
    gate: str
    """Address at which nodes are let in, HOST:PORT."""
    gate_process: Callable[[], Child]
    """Returns the gate's present process."""
    superlink: Callable[[], Child]
    """Returns the SuperLink's present process."""
    nodes: Callable[[], list[Child]]
    """Returns the nodes' present processes, in the order of their clients."""


@contextmanager
def federation(
    out: Path, nodes: int, *, paths: list[str], shared_seed: bool
) -> Iterator[RunningFederation]:
    """Starts a SuperLink, its gate and `nodes` nodes; ends them all with the `with` block.

    The block gets a `RunningFederation`. A part that dies is started again, but for a SuperLink or
    node that refused its input (status 2). A FedsimError says that a part does not start at first.

    Args:
        out: The run's folder, in which nodes get folders of their own.
        nodes: Number of nodes, which are clients 0 to `nodes` - 1.
        paths: Files that the scenario names and that nodes may open.
        shared_seed: Whether nodes draw from the scenario's seed, and not from own secrets.
    """
    flower.check_version()
    logs = out / "network"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as until_the_end:
        folder = until_the_end.enter_context(scratch("fedsim-up-"))
        keys = folder / "keys"
        make_keys(keys, nodes, [_HOST, "localhost"], days=2)
        runner, guard = keys / "runner", keys / "gate"
        port = free_port()
        watched = _Watched()
        until_the_end.callback(watched.stop)
        link = watched.add(lambda: superlink(keys / "superlink", port, logs / "superlink.log"))
        link().await_port(port)
        reached = Link(
            superlink=f"{_HOST}:{port}",
            roots=runner / "ca.crt",
            secret=runner / "superexec.secret",
            shared_seed=shared_seed,
        )
        gate = f"{_HOST}:{free_port()}"
        command = [
            *(sys.executable, "-m", "fedsim.federation.network.gate"),
            *("--listen", gate, "--superlink", reached.superlink),
            *("--certificate", str(guard / "server.crt"), "--key", str(guard / "server.key")),
            *("--roots", str(guard / "ca.crt")),
        ]
        # A gate whose address is taken for a moment ends as if its input were wrong for ever.
        keeper = watched.add(partial(Child, command, logs / "gate.log"), gives_up=False)
        keeper().await_words(f"gate at {gate}", "the gate")
        policy = folder / "policy.yaml"
        # JSON is YAML, too.
        policy.write_text(json.dumps({"paths": paths}))
        found = []
        for client in range(nodes):
            home = out / "nodes" / f"node-{client}"
            make_private(home)
            own = keys / home.name
            flower.register(reached, (runner / f"{home.name}.pub").read_bytes())
            command = [
                *(sys.executable, "-m", "fedsim", "node"),
                *("--superlink", gate, "--root-certificates", str(own / "ca.crt")),
                *("--key", str(own / "key"), "--client", str(client), "--data", SCENARIO),
                *("--home", str(home), "--policy", str(policy)),
                *("--signing-key", str(own / KEY_NAME), "--peers", str(own / PEERS_NAME)),
                *(["--shared-seed"] if shared_seed else []),
            ]
            found.append(watched.add(partial(Child, command, home / "node.log")))
        # Waited for once all have been started, since each takes seconds to import torch.
        for client, node in enumerate(found):
            node().await_words(JOINED, f"node {client}")
        yield RunningFederation(
            link=reached,
            gate=gate,
            gate_process=keeper,
            superlink=link,
            nodes=lambda: [node() for node in found],
        )


class _Watched:
    def __init__(self) -> None:
        self._starts: list[tuple[Callable[[], Child], bool]] = []
        self._children: list[Child] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="network", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        # The watcher ends first: otherwise it would start again what is stopped here.
        self._thread.join()
        stopping = [threading.Thread(target=child.stop) for child in reversed(self._children)]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    def add(self, start: Callable[[], Child], *, gives_up: bool = True) -> Callable[[], Child]:
        """Calls `start` now and whenever its program has ended; refused input may be for good."""
        number = len(self._children)
        self._children.append(start())
        self._starts.append((start, gives_up))
        return lambda: self._children[number]

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_SECONDS):
            for number, (start, gives_up) in enumerate(list(self._starts)):
                child = self._children[number]
                child.bound_log()
                if child.status not in (None, _REFUSED if gives_up else None):
                    child.stop()  # and whatever it left behind
                    if self._stop.wait(_NODE_REST):
                        return
                    # A disk may be full for a while: it is tried again.
                    with suppress(OSError, FedsimError):
                        self._children[number] = start()
