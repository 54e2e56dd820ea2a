"""Asks nodes, before any training, how much they hold and whether they would answer at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from fedsim.federation import wire
from fedsim.federation.delivery import OnWait, roll_call
from fedsim.training.server import Census
from fedsim.types import FedsimError, Unit
from fedsim.words import printable

ACTION = "census"
"""Action of the query that asks how much a node holds, and whether it would answer every stack."""

_VERSION, _HELD, _STATISTICS = "version", "held", "statistics"
_MOST_HELD = 2**40
# Limits: reasons kept per node, characters kept per reason.
_REASONS, _REASON = 20, 500


def answer(client: int, held: int, statistics: Mapping[Unit, tuple[str, ...]]) -> RecordDict:
    """Returns the content of a node's answer to a census.

    `held` is the number of its examples; `statistics` why no claim can be made, by privacy unit.
    """
    said = json.dumps({unit: list(reasons) for unit, reasons in statistics.items()})
    told = ConfigRecord(
        {_VERSION: wire.VERSION, wire.CLIENT: client, _HELD: held, _STATISTICS: said}
    )
    return RecordDict({wire.CONFIG: told})


def take(grid: Grid, clients: int, patience: float, on_wait: OnWait | None = None) -> Census:
    """Asks all `clients` nodes how many examples they hold; returns the answers of all clients.

    Reasons of all clients are joined, each once. Nodes have to connect within `patience` seconds,
    of which `on_wait` is called with their number. A node that refuses, and two that say they are
    one client, are a `FedsimError`.
    """
    held: dict[int, int] = {}
    statistics: dict[Unit, list[str]] = {unit: [] for unit in get_args(Unit)}
    for _, content in roll_call(grid, clients, RecordDict(), ACTION, patience, on_wait):
        client, count, reasons = _read(content)
        if client in held:
            raise FedsimError(f"two nodes say that they are client {client}; give each its own")
        held[client] = count
        for unit, own in statistics.items():
            # Clients of one scenario give equal reasons, and one is enough.
            own += [reason for reason in reasons.get(unit, []) if reason not in own]
    missing = sorted(set(range(clients)) - set(held))
    if missing:
        raise FedsimError(f"no node is client {missing[0]}; number them 0 to {clients - 1}")
    return Census(
        held=[held[client] for client in range(clients)],
        private_statistics={unit: tuple(own) for unit, own in statistics.items()},
    )


def _read(content: RecordDict) -> tuple[int, int, Mapping[str, list[str]]]:
    config = content.get(wire.CONFIG)
    # Version 1 did not say which it was.
    if isinstance(config, ConfigRecord) and config.get(_VERSION, "1") != wire.VERSION:
        raise FedsimError(
            f"a node's messages are of version {printable(str(config.get(_VERSION, '1')))[:40]}, "
            f"and this server's of version {wire.VERSION}: install the same fedsim on both sides"
        )
    try:
        assert isinstance(config, ConfigRecord)
        held, statistics = config[_HELD], json.loads(str(config[_STATISTICS]))
        assert isinstance(held, int) and 0 <= held < _MOST_HELD
        reasons = {
            str(unit): [printable(str(reason))[:_REASON] for reason in said[:_REASONS]]
            for unit, said in statistics.items()
        }
    except (
        AssertionError,
        KeyError,
        ValueError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        raise FedsimError("a node answers a census with something else") from error
    return wire.read_client(content), held, reasons
