"""How many of a group a threshold asks for."""

from __future__ import annotations

import math

_ROUNDING = 1e-9
"""So that 2/3 of 6 is 4."""


def least(members: int, threshold: float) -> int:
    """The least number of `members` that is a majority and at least their `threshold` share."""
    return max(members // 2 + 1, math.ceil(threshold * members - _ROUNDING))
