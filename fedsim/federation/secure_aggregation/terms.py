"""What everybody who takes part in one secure sum knows before it: who, how many, and what counts.

It follows from the scenario, so that a client can refuse a server that says otherwise. On a ring
each client shares its secrets with the k / 2 next on either side, in an order that nobody knows
before keys are published (Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead, CCS 2020, Section 3). k is the least for which, of whatever is opened,

- the graph of honest clients hangs together, so that no sum over a part of them is seen, and nobody
  gets both secrets of one: a client's neighbourhood of k + 1 holds fewer than t - 1 - k / 2 that
  collude, but for a chance of 2^-40;
- a sum is opened at all if 5% drop out: t of every neighbourhood are left, but for one of 2^-20.

A server chooses who is in the directory that decides the order: so the chance of collusion is that
of one of no more than a quorum, with all that collude in it, and it is 2^-80 for one directory, of
which the server may try 2^40. The chances are hypergeometric, for an attacker who chose its clients
beforehand.

t is the threshold's share of k + 1. Whoever is in the sum had its seed revealed by t holders, of
whom more than k / 2 are then honest neighbours that are in the sum, too: so each side of the ring
has one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.types import FedsimError
from fedsim.words import number_of

Ring = NDArray[np.unsignedinteger[Any]]
"""Numbers modulo 2^32 or 2^64: shape (n,), of uint32 or uint64."""

# So that 2/3 of 6 is 4.
_ROUNDING = 1e-9


def least(members: int, threshold: float) -> int:
    """Returns the least number of `members` that is a majority and at least a share `threshold`."""
    # A majority, so that any two such sets share a member, who consents to one sum only.
    return max(members // 2 + 1, math.ceil(threshold * members - _ROUNDING))


COMPLETE_BELOW = 100
"""Number of clients below which every client is a neighbour of every other."""
# Largest chances over all clients that too many neighbours collude, and that a sum cannot be
# opened.
_SECRECY, _COMPLETION = 2.0**-80, 2.0**-20
_DROPOUTS = 0.05
_LEAST = 4


@cache
def degree(clients: int, threshold: float, colluding: float) -> int:
    """Returns how many neighbours each of `clients` clients has; `clients` - 1 means all others.

    `threshold` is the share of a neighbourhood that reveals a secret, in (0, 1], and `colluding`
    the share of the clients that may tell the server all they know, in [0, 1].
    """
    if clients < COMPLETE_BELOW:
        return clients - 1
    from scipy.stats import hypergeom

    # The server may leave out honest clients until a quorum is left: all that collude are in it.
    bad, gone = math.floor(colluding * clients), math.floor(_DROPOUTS * clients)
    others, fewest = clients - 1, least(clients, threshold) - 1
    # Even numbers alone: half of the neighbours stand on either side of the ring.
    for neighbours in range(_LEAST, fewest, 2):
        needed = least(neighbours + 1, threshold)
        # The bound t - 1 - k / 2 of the module's text, from which on a neighbourhood is unsafe.
        too_many = needed - 1 - neighbours // 2
        if too_many < 1:
            continue
        # Union bounds over all clients, each of whom draws k neighbours without replacement.
        seen = clients * float(hypergeom.sf(too_many - 1, fewest, bad, neighbours))
        lost = clients * float(hypergeom.sf(neighbours + 1 - needed, others, gone, neighbours))
        if seen <= _SECRECY and lost <= _COMPLETION:
            return neighbours
    return others


class AbortedError(FedsimError):
    """Raised when the other side broke the protocol, or too few clients are left for a sum."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms of one round's secure sum; fewer than two participants are a `FedsimError`."""

    session: bytes
    """Public bytes that name this sum and no other."""
    participants: tuple[int, ...]
    """The clients that are asked, ascending."""
    threshold: float
    """Share of participants that a sum needs, and of holders that reveal a secret; above 1/2."""
    colluding: float = 0.0
    """Share of the participants that may tell the server all they know."""
    fewest: int = 1
    """Least number of clients whose shared noise is enough for a sum; 1 without such noise."""

    def __post_init__(self) -> None:
        if len(self.participants) < 2:
            raise FedsimError(
                "secure_aggregation: a sum over "
                f"{number_of(len(self.participants), 'client')} is that client's update; let two "
                "or more take part in each round (data.clients, federation.participation)"
            )

    @property
    def quorum(self) -> int:
        """Least number of clients whose masked vectors make a sum that may be opened."""
        return max(self.fewest, least(len(self.participants), self.threshold))

    def neighbours(self, client: int, directory: Collection[int], digest: bytes) -> list[int]:
        """Returns the clients with whom `client` shares masks and secrets, ascending; symmetric.

        Below 100 participants, or where no smaller number is safe, they are all others in the
        `directory`. Otherwise they are the k (`degree`) clients within k / 2 places on a ring (a
        Harary graph: Bell et al., CCS 2020, Section 3). `digest`, of the published keys, decides
        the order on it. A `client` that is not in the directory then is a ValueError.
        """
        # Sorted input and a seeded permutation give the server and every client the same ring.
        everyone = sorted(directory)
        reach = self._degree // 2
        if self.complete:
            return [other for other in everyone if other != client]
        seed = int.from_bytes(hashlib.sha256(b"graph" + self.session + digest).digest(), "big")
        order = np.random.default_rng(seed).permutation(len(everyone))
        ring = [everyone[place] for place in order]
        at = ring.index(client)
        steps = [*range(-reach, 0), *range(1, reach + 1)]
        return sorted(ring[(at + step) % len(ring)] for step in steps)

    @property
    def shares(self) -> int:
        """Number of shares that reveal a secret; it does not depend on who has published keys."""
        # Otherwise a server could lower it by leaving clients out.
        return self.quorum if self.complete else least(self._degree + 1, self.threshold)

    @property
    def complete(self) -> bool:
        """Whether every client is a neighbour of every other."""
        return self._degree >= len(self.participants) - 1

    @cached_property
    def _degree(self) -> int:
        return degree(len(self.participants), self.threshold, self.colluding)
