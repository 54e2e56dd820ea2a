"""What a round's secure sum is: both sides know it from the scenario, and nobody is told."""

from __future__ import annotations

import json
from dataclasses import replace

from fedsim.federation import wire
from fedsim.federation.checkpoint import fingerprint
from fedsim.federation.secure_aggregation.layout import Layout
from fedsim.federation.secure_aggregation.secrets import digest
from fedsim.federation.secure_aggregation.terms import Terms
from fedsim.scenario.document import blaming
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import FedsimError

# Bits of the ring. Closed-form releases solve equations, in float64.
_TRAINING_BITS, _CLOSED_FORM_BITS = 32, 64


def parts(server: Server, round: int) -> list[Probe | None]:
    """Returns the content of each part of a vector of `round`: training (None), then each probe."""
    asked = server.plan(round).probes
    again = range(server.scenario.observe.releases)
    return [None, *(replace(probe, release=release) for release in again for probe in asked)]


def terms(server: Server, round: int, run: str = "") -> Terms:
    """Returns the terms of the sum of `round`.

    `run` is the run's name if nodes draw secrets of their own; else empty.
    """
    participants = server.plan(round).participants
    agreed = server.sum_terms(None)
    # All that decides what clients add: shown another scenario, a client is in another session.
    named = [fingerprint(server.scenario, server.stack_name), list(server.census.held)]
    at = [run, server.stack_name, round, participants]
    return Terms(
        session=digest(b"session", json.dumps([*named, *at]).encode()),
        participants=tuple(participants),
        threshold=agreed.threshold,
        colluding=agreed.colluding,
        fewest=server.stack.least_clients,
    )


def check(server: Server) -> None:
    """Refuses secure sums that cannot work; a stack without secure sums passes."""
    if server.protocol is None:
        return
    with blaming(f"defenses.{server.stack_name}"):
        terms(server, 1)
        rounds = range(1, server.scenario.training.rounds + 1)
        # Only observed rounds hold probes. Round 1 stands for all others, which hold training
        # alone.
        for round in {1, *filter(server.schedule.is_observed, rounds)}:
            planned = layout(server, round)
            for part, agreed in enumerate(planned.sums):
                # Its constructor refuses noise that rounding would eat.
                planned.fixed_point(part)
                if planned.buffers and not agreed.buffer_range:
                    raise FedsimError(
                        "secure_aggregation: clients release batch-norm statistics, of which "
                        "nothing bounds the entries; give buffer_range, or choose the model's "
                        "norm: group"
                    )


def layout(server: Server, round: int) -> Layout:
    """Returns the layout of the vectors of `round`, whose stack must have secure sums."""
    parameters, buffers = server.initial()
    return Layout(
        sums=tuple(server.sum_terms(part) for part in parts(server, round)),
        clients=len(server.plan(round).participants),
        ring_bits=_CLOSED_FORM_BITS if server.release else _TRAINING_BITS,
        update=parameters,
        buffers=wire.floating(buffers) if server.releases_statistics else {},
    )
