"""Secure sums without messages: both sides in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from federation_support import identities

from fedsim.federation.secure_aggregation.client import SumClient
from fedsim.federation.secure_aggregation.server import SumServer
from fedsim.federation.secure_aggregation.terms import Ring, Terms

MODEL = b"the model that all were shown"
NOBODY: Collection[int] = ()


def of(count: int, threshold: float = 2 / 3, *, session: bytes = b"a session") -> Terms:
    """Terms of a sum of so many clients."""
    return Terms(session=session, participants=tuple(range(count)), threshold=threshold)


def vectors(count: int, length: int, seed: int = 0) -> dict[int, Ring]:
    stream = np.random.default_rng(seed)
    return {client: stream.integers(0, 2**32, length, dtype=np.uint32) for client in range(count)}


def fresh(purpose: str) -> bytes:
    """32 bytes that nobody knows."""
    return os.urandom(32)


@dataclass
class Sum:
    """A sum that is carried out stage by stage; clients that are gone in a stage stay away."""

    terms: Terms
    inputs: Mapping[int, Ring]
    secret: Callable[[int, str], bytes] = lambda client, purpose: fresh(purpose)
    sent: dict[int, Ring] = field(default_factory=dict)
    """Masked vectors, as the server got them."""

    def __post_init__(self) -> None:
        everyone = identities(len(self.terms.participants))
        self.clients = {n: SumClient(self.terms, n, everyone[n]) for n in self.terms.participants}
        self.server = SumServer(self.terms)

    def keys(self, gone: Collection[int] = NOBODY) -> None:
        here = [one for one in self.clients if one not in gone]
        self.directory = {one: self.clients[one].keys(partial(self.secret, one)) for one in here}
        self.server.publish(self.directory)

    def shares(self, gone: Collection[int] = NOBODY) -> None:
        for one in self.directory:
            if one not in gone:
                self.server.share(one, self.clients[one].shares(self.directory))

    def mask(self, gone: Collection[int] = NOBODY, models: Mapping[int, bytes] = {}) -> None:
        for one in self.server.sharers:
            boxes = self.server.boxes_for(one)
            if one not in gone:
                vector, signature = self.clients[one].mask(
                    boxes, self.inputs[one].copy, models.get(one, MODEL)
                )
                self.sent[one] = vector.copy()
                self.server.add(one, vector, signature)

    def agree(self, gone: Collection[int] = NOBODY) -> None:
        survivors, server = self.server.survivors, self.server
        for one in survivors:
            if one not in gone:
                lists = survivors, server.lost, server.signatures
                server.agree(one, self.clients[one].agree(*lists))

    def unmask(self, gone: Collection[int] = NOBODY) -> dict[int, dict[int, bytes]]:
        agreed = self.server.agreed
        return {one: self.clients[one].unmask(agreed) for one in agreed if one not in gone}

    def through(self, stages: int) -> Sum:
        """After so many stages that nobody misses."""
        for step in (self.keys, self.shares, self.mask, self.agree)[:stages]:
            step()
        return self

    def run(self, *gone: Collection[int]) -> Ring:
        """The opened sum; `gone` says who stays away from which stage on."""
        away = [set().union(*gone[: stage + 1]) for stage in range(5)]
        self.keys(away[0])
        self.shares(away[1])
        self.mask(away[2])
        self.agree(away[3])
        return self.server.reveal(self.unmask(away[4]))


def added(inputs: Mapping[int, Ring], clients: Collection[int]) -> Ring:
    """The sum of some clients' vectors, without a protocol."""
    total: Ring = np.zeros_like(next(iter(inputs.values())))
    for client in clients:
        total = total + inputs[client]
    return total
