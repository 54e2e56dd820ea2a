"""The leverage of a database's rows, as a claim may assume it to be bounded."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fedsim.privacy.mechanisms import least_squares, projection
from fedsim.types import FedsimError
from fedsim.words import number_of

_ROUNDING = 1e-9
"""Relative error of a measured leverage; it changes a claim by no more than that."""


def largest(rows: Tensor) -> float:
    """Returns the largest leverage v'(D'D)^+ v of a row v of D (n, d), in [0, 1]; 0 without rows.

    Directions of D that are lost in the rounding of its largest singular value do not count.
    """
    if not len(rows):
        return 0.0
    left, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = lengths > lengths.max() * max(rows.shape) * torch.finfo(rows.dtype).eps
    # With D = U S V', v'(D'D)^+ v is the squared length of the row's part of U.
    return float(left[:, kept].square().sum(1).max())


def largest_residual(rows: Tensor) -> float:
    """Returns the largest share e_i² / |e|² of a row of [B, b] (n, d + 1), in [0, 1].

    Of residuals e that are all lost in rounding, a row may have any share: 1.
    """
    if not len(rows):
        return 0.0
    features, target = rows[:, :-1], rows[:, -1:]
    best = torch.linalg.lstsq(features, target, driver="gelsd").solution
    squares = (target - features @ best).square()
    if float(squares.sum()) <= 1e-20 * float(target.square().sum()):
        return 1.0
    return float(squares.max() / squares.sum())


def require(declared: float, rows: Tensor, of: str, defense: str) -> None:
    """Refuses rows (n, d) `of` somebody if one has more than the `declared` leverage.

    `defense` is the name that the message gives.

    Raises:
        FedsimError: one has.
    """
    _refuse_more("leverage", declared, largest(rows), rows, of, defense)


def require_residual(declared: float, rows: Tensor, of: str, defense: str) -> None:
    """Refuses rows (n, d + 1) `of` somebody if one has more than the `declared` residual.

    Raises:
        FedsimError: one has.
    """
    _refuse_more("residual", declared, largest_residual(rows), rows, of, defense)


def _refuse_more(
    key: str, declared: float, found: float, rows: Tensor, of: str, defense: str
) -> None:
    if found > declared * (1 + _ROUNDING):
        raise FedsimError(
            f"{defense}.{key}: expected no row above {declared:g}, got {found:.6g} among the "
            f"{number_of(len(rows), 'row')} of {of}, so that the claim would not hold; declare "
            "what holds of "
            "every database to hide among, or leave it out for a claim that holds of any"
        )


@cache
def max_leverage(epsilon: float, delta: float, r: int, d: int | None) -> float:
    """Returns the largest private leverage: for M_LS with d features, or a sketch if d is None.

    r is the number of columns of the random matrix.
    """
    if d is None:
        return float(projection.max_leverage(epsilon, delta, r))
    return least_squares.max_leverage(epsilon, delta, r, d)
