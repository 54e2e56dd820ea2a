"""With how many others a client shares its secrets, so that a sum over many clients stays cheap.

On a ring each client has the k / 2 next on either side as neighbours, in an order that nobody knows
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

import math
from functools import cache

from fedsim.federation.secure_aggregation.quorum import least

COMPLETE_BELOW = 100
"""With fewer clients, all are neighbours."""
_SECRECY, _COMPLETION = 2.0**-80, 2.0**-20
_DROPOUTS = 0.05
_LEAST = 4


@cache
def degree(clients: int, threshold: float, colluding: float) -> int:
    """How many neighbours each of so many `clients` has; `clients` - 1: all others.

    Args:
        clients: That take part.
        threshold: Share of a neighbourhood that has to be there.
        colluding: Share of the clients that may tell the server all they know.
    """
    if clients < COMPLETE_BELOW:
        return clients - 1
    from scipy.stats import hypergeom

    bad, gone = math.floor(colluding * clients), math.floor(_DROPOUTS * clients)
    others, fewest = clients - 1, least(clients, threshold) - 1
    for neighbours in range(_LEAST, fewest, 2):
        needed = least(neighbours + 1, threshold)
        too_many = needed - 1 - neighbours // 2
        if too_many < 1:
            continue
        seen = clients * float(hypergeom.sf(too_many - 1, fewest, bad, neighbours))
        lost = clients * float(hypergeom.sf(neighbours + 1 - needed, others, gone, neighbours))
        if seen <= _SECRECY and lost <= _COMPLETION:
            return neighbours
    return others
