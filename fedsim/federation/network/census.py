"""Asks nodes, before any training, how much they hold and whether they would answer at all."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.federation import wire
from fedsim.federation.delivery import START_SECONDS, exchange
from fedsim.training.census import Census
from fedsim.types import FedsimError, Unit

ACTION = "census"
"""Of a query: how much do you hold, and would you answer every stack of this scenario?"""

_HELD, _STATISTICS = "held", "statistics"
_UNITS = ("client", "example")
_POLL_SECONDS = 0.5


def answer(client: int, held: int, statistics: Mapping[Unit, tuple[str, ...]]) -> RecordDict:
    """The content of a node's answer: its number, how many examples it holds, and the reasons why
    nothing can be claimed, by unit."""
    said = json.dumps({unit: list(reasons) for unit, reasons in statistics.items()})
    return RecordDict(
        {wire.CONFIG: ConfigRecord({wire.CLIENT: client, _HELD: held, _STATISTICS: said})}
    )


def take(grid: Grid, clients: int) -> Census:
    """Ask all nodes, waiting until there are as many as clients.

    Raises:
        FedsimError: too few come, one refuses (with its reason), or two say they are one client.
    """
    begun = time.monotonic()
    while len(nodes := sorted(grid.get_node_ids())) < clients:
        if time.monotonic() - begun > START_SECONDS:
            raise FedsimError(f"{len(nodes)} of {clients} nodes came; start one node per client")
        time.sleep(_POLL_SECONDS)
    asked = [Message(RecordDict(), node, f"query.{ACTION}") for node in nodes]
    held: dict[int, int] = {}
    statistics: dict[str, list[str]] = {unit: [] for unit in _UNITS}
    for _, reply in exchange(grid, asked, START_SECONDS, expire_after=START_SECONDS):
        if reply is None:
            raise FedsimError("a node does not answer")
        if reply.has_error():
            raise FedsimError(f"a node refuses: {str(reply.error.reason)[:500]}")
        client, count, reasons = _read(reply.content)
        if client in held:
            raise FedsimError(f"two nodes say that they are client {client}; give each its own")
        held[client] = count
        for unit in _UNITS:
            own = statistics[unit]
            own += [reason for reason in reasons.get(unit, []) if reason not in own]
    missing = sorted(set(range(clients)) - set(held))
    if missing:
        raise FedsimError(f"no node is client {missing[0]}; number them 0 to {clients - 1}")
    return Census(
        held=[held[client] for client in range(clients)],
        private_statistics={
            "client": tuple(statistics["client"]),
            "example": tuple(statistics["example"]),
        },
    )


def _read(content: RecordDict) -> tuple[int, int, Mapping[str, list[str]]]:
    config = content.get(wire.CONFIG)
    try:
        assert isinstance(config, ConfigRecord)
        held, statistics = config[_HELD], json.loads(str(config[_STATISTICS]))
        assert isinstance(held, int) and held >= 0
        reasons = {str(unit): [str(reason) for reason in said] for unit, said in statistics.items()}
    except (AssertionError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise FedsimError("a node answers a census with something else") from error
    return wire.read_client(content), held, reasons
