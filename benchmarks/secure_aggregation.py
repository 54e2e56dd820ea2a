"""What a secure sum costs: seconds of a client's and of the server's stages, and bytes up.

All sides run in this process, one after the other, without messages; so a client's seconds are its
own, and the server's are of the whole sum. In the same run, the peer: adding up plain float32
vectors. One client in twenty drops out before it sends its vector (with fewer than 20, one).

    python benchmarks/secure_aggregation.py [--quick] [--large] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsim import rng
from fedsim.contracts.defense import SumTerms
from fedsim.federation import wire
from fedsim.federation.secure_aggregation import messages
from fedsim.federation.secure_aggregation.client import SumClient
from fedsim.federation.secure_aggregation.plan import Layout
from fedsim.federation.secure_aggregation.secrets import Identity
from fedsim.federation.secure_aggregation.server import SumServer
from fedsim.federation.secure_aggregation.terms import Ring, Terms
from fedsim.federation.wire import size_of
from fedsim.types import Update

T = TypeVar("T")


def _fresh(_: str) -> bytes:
    return os.urandom(32)


_SUM = SumTerms(
    threshold=2 / 3,
    colluding=0.0,
    range=1.0,
    buffer_range=0.0,
    most_examples=8,
    norm=float("inf"),
    noise=0.0,
)


class _Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def of(self, name: str, work: Callable[..., T], *arguments: object) -> T:
        """What `work` returns; its time is kept."""
        begun = time.perf_counter()
        found = work(*arguments)
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return found


def case(clients: int, parameters: int) -> dict[str, Any]:
    """Figures of one sum."""
    clock = _Clock()
    layout = Layout(
        sums=(_SUM,),
        clients=clients,
        ring_bits=32,
        update={"w": torch.zeros(parameters)},
        buffers={},
    )
    terms = Terms(session=os.urandom(32), participants=tuple(range(clients)), threshold=2 / 3)
    keys = [Ed25519PrivateKey.generate() for _ in range(clients)]
    peers = {n: key.public_key().public_bytes_raw() for n, key in enumerate(keys)}
    sides = [SumClient(terms, n, Identity(key=keys[n], peers=peers)) for n in range(clients)]
    server = SumServer(terms)
    directory = {n: clock.of("keys", side.keys, _fresh) for n, side in enumerate(sides)}
    clock.of("server", server.publish, directory)
    for n, side in enumerate(sides):
        boxes = clock.of("shares", side.shares, directory)
        server.share(n, boxes)
    update = Update(tensors={"w": torch.rand(parameters) * 2 - 1}, num_examples=8)
    plain = np.zeros(parameters, np.float32)
    lost = max(1, clients // 20)

    def encoded(client: int) -> Ring:
        return layout.vector([update], lambda part: rng.generator(client, "rounding"))

    for n, side in enumerate(sides[lost:], start=lost):
        vector = clock.of("encoding", encoded, n)
        received = server.boxes_for(n)
        ring, signature = clock.of("masked", side.masked, received, vector.copy, b"model")
        clock.of("server", server.add, n, ring, signature)
        clock.of("plain", np.add, plain, update.tensors["w"].numpy(), plain)
    lists = server.survivors, server.lost, server.signatures
    for n, side in enumerate(sides[lost:], start=lost):
        server.agree(n, clock.of("agree", side.agree, *lists))
    answers = {
        n: clock.of("unmask", side.unmask, server.agreed)
        for n, side in enumerate(sides[lost:], start=lost)
    }
    total = clock.of("server", server.reveal, answers)
    mean = layout.sum_of(total, 0, clients - lost)
    error = float((mean.tensors["w"] - update.tensors["w"]).double().abs().max())
    up = (
        size_of(messages.table(1, boxes))
        + size_of(messages.table(1, {0: directory[0].to_bytes()}))
        + size_of(messages.masked_answer(total, bytes(64)))
        + size_of(messages.table(1, {lost: server.agreed[lost]}))
        + size_of(messages.table(1, answers[lost]))
    )
    client = {
        name: statistics.median(clock.seconds[name])
        for name in ("keys", "shares", "encoding", "masked", "agree", "unmask")
    }
    return {
        "clients": clients,
        "neighbours": len(terms.neighbours(0, range(clients), b"")),
        "parameters": parameters,
        "bits": layout.fixed_point(0).bits,
        "client_seconds": client,
        "server_seconds": sum(clock.seconds["server"]),
        "plain_server_seconds": sum(clock.seconds["plain"]),
        "bytes_up": up,
        "of_plain": up / size_of(wire.answer(update, None)),
        "error": error,
    }


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small cases alone")
    parser.add_argument("--large", action="store_true", help="50 million parameters, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(5, 60_000), (20, 60_000), (100, 60_000)]
    cases += [] if arguments.quick else [(5, 5_000_000), (20, 5_000_000)]
    cases += [(3, 50_000_000)] if arguments.large else []
    found = []
    for clients, parameters in cases:
        row = case(clients, parameters)
        found.append(row)
        own = {name: round(value, 4) for name, value in row["client_seconds"].items()}
        print(
            f"{clients:4} clients, {row['neighbours']:3} neighbours, {parameters:>10,} parameters: "
            f"a client {sum(row['client_seconds'].values()):.3f} s {own}, server "
            f"{row['server_seconds']:.3f} s (plain {row['plain_server_seconds']:.3f}), up "
            f"{row['of_plain']:.4f} of plain, {row['bits']} bits, error {row['error']:.1e}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
