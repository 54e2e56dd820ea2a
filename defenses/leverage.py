"""The leverage of a database's rows, and how far rows σ I appended to it lower that."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.types import FedsimError
from fedsim.words import number_of

_ROUNDING = 1e-9
"""Relative error of a measured leverage. A claim changes as little by it."""


def largest(rows: Tensor) -> float:
    """The largest leverage v'(D'D)^+ v of a row v of D (n, d), in [0, 1]; 0 if there is no row.

    Directions of D that are lost in the rounding of its largest singular value do not count.
    """
    if not len(rows):
        return 0.0
    left, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = lengths > lengths.max() * max(rows.shape) * torch.finfo(rows.dtype).eps
    return float(left[:, kept].square().sum(1).max())


def require(declared: float, rows: Tensor, of: str, defense: str) -> None:
    """Refuse rows (n, d) `of` somebody, of which one has more than the `declared` leverage.

    Raises:
        FedsimError: one has.
    """
    found = largest(rows)
    if found > declared * (1 + _ROUNDING):
        raise FedsimError(
            f"{defense}.leverage: expected no row above {declared:g}, got {found:.6g} among the "
            f"{number_of(len(rows), 'row')} of {of}, so that the claim would not hold; declare "
            "what holds of "
            "every database to hide among, or leave it out for a claim that holds of any"
        )


def bound(sigma: float, row_norm: float, leverage: float) -> float:
    """The largest leverage of a row v of norm up to l in [D; σ I], given that in D.

    v'(D'D)^-1 v <= p says that D'D - vv'/p is positive semidefinite, so that with σ² I added it is
    at most 1 / (1/p + σ²/l²), which is attained by a database of rows along v. Without any
    knowledge of D p is 1, since D holds the row itself.
    """
    return 1 / (1 / leverage + (sigma / row_norm) ** 2)


def lowering(allowed: float, row_norm: float, leverage: float) -> float:
    """The least σ for which `bound` is at most `allowed`; 0 if `leverage` is no more than that.

    Raises:
        FedsimError: no finite σ is enough.
    """
    if allowed >= leverage:
        return 0.0
    if allowed <= 0:
        raise FedsimError("no noise is enough for this ε and δ; raise one of them")
    return row_norm * math.sqrt(1 / allowed - 1 / leverage)
