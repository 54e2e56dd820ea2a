"""What everybody who takes part in one secure sum knows before it: who, how many, and what counts.

All of it follows from the scenario, so that a client can refuse a server that says otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedsim.federation.secure_aggregation.graph import degree
from fedsim.federation.secure_aggregation.quorum import least
from fedsim.types import FedsimError
from fedsim.words import number_of


class AbortedError(FedsimError):
    """A side does not go on: what it was told breaks the protocol, or too few are left."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Of one round's secure sum."""

    session: bytes
    """Tells this sum from every other; public."""
    participants: tuple[int, ...]
    """The clients that are asked, ascending."""
    threshold: float
    """Share of those who hold shares of a secret that has to be there to reveal it; above 1/2."""
    colluding: float = 0.0
    """Share of the participants that may tell the server all they know."""
    fewest: int = 1
    """With fewer clients, a sum has too little of the noise that they share."""

    def __post_init__(self) -> None:
        """Refuse terms under which a sum would not hide its parts.

        Raises:
            FedsimError: there are fewer than two participants.
        """
        if len(self.participants) < 2:
            raise FedsimError(
                "secure_aggregation: a sum over "
                f"{number_of(len(self.participants), 'client')} is that client's update; let two "
                "or more take part in each round (data.clients, federation.participation)"
            )

    @property
    def quorum(self) -> int:
        """How many masked vectors a sum takes at least."""
        return max(self.fewest, least(len(self.participants), self.threshold))

    def neighbours(self, client: int, directory: Collection[int], digest: bytes) -> list[int]:
        """With whom `client` shares masks and secrets, ascending; the relation is symmetric.

        All others, where there are fewer than 100 or no smaller number would do. Else k of
        them, on a ring of the clients in an order that `digest` decides: those within k / 2 places
        (a Harary graph: Bell et al., CCS 2020, Section 3).

        Args:
            client: Whose.
            directory: The clients that published keys.
            digest: Of these keys, so that nobody knows the order before they are published.
        """
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
        """How many shares reveal a secret.

        It does not depend on who has published keys: else a server that leaves clients out would
        lower it.
        """
        return self.quorum if self.complete else least(self._degree + 1, self.threshold)

    @property
    def complete(self) -> bool:
        """Whether every client is a neighbour of every other."""
        return self._degree >= len(self.participants) - 1

    @cached_property
    def _degree(self) -> int:
        return degree(len(self.participants), self.threshold, self.colluding)
