"""Computes how far rows σ I appended to a database lower the leverages of its rows.

Where no error is stated, arguments are not checked.
"""

from __future__ import annotations

import math

from fedsim.types import FedsimError

_UP = 1 + 1e-12
"""Factor on σ: rounding must not lift an ε that is stated above the one asked for."""


def bound(sigma: float, row_norm: float, leverage: float) -> float:
    """Computes the largest leverage of a row v of norm up to l in [D; σ I], given that in D.

    `row_norm` is l, and `leverage` is p in (0, 1], the largest leverage of v in D; without any
    knowledge of D it is 1, since D holds the row itself. v'(D'D)^-1 v <= p says that D'D - vv'/p is
    positive semidefinite: with σ² I added the leverage is at most 1 / (1/p + σ²/l²), which a
    database of rows along v attains.
    """
    return 1 / (1 / leverage + (sigma / row_norm) ** 2)


def lowering(allowed: float, row_norm: float, leverage: float) -> float:
    """Computes the least σ for which `bound` is at most `allowed`; 0 if `leverage` is no more.

    Raises:
        FedsimError: no finite σ is enough.
    """
    if allowed >= leverage:
        return 0.0
    if allowed <= 0:
        raise FedsimError("no noise is enough for this ε and δ; raise one of them")
    return row_norm * math.sqrt(1 / allowed - 1 / leverage) * _UP


def regularize_leverage(leverage: float, sabotage: float) -> float:
    """Computes a row's leverage after the noise σ is multiplied by `sabotage`.

    The row stands alone against σ: its `leverage` before was |v|² / (|v|² + σ²).

    >>> regularize_leverage(0.5, 1.0), regularize_leverage(0.5, 0.5)
    (0.5, 0.8)
    """
    return leverage / (leverage + sabotage**2 * (1 - leverage))
