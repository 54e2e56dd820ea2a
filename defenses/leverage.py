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
    """Returns the largest leverage v'(D'D)^+ v of a row v of D (n, d); 0 without rows."""
    if not len(rows):
        return 0.0
    left, lengths, _ = torch.linalg.svd(rows, full_matrices=False)
    kept = lengths > lengths.max() * max(rows.shape) * torch.finfo(rows.dtype).eps
    # With D = U S V', v'(D'D)^+ v is the squared length of the row's part of U.
    return float(left[:, kept].square().sum(1).max())


def largest_residual(rows: Tensor) -> float:
    """Returns the largest share e_i² / |e|² that a row has of the squared residuals, in [0, 1].

    `rows` is [B, b] (n, d + 1), and e the residual of the least-squares fit of b by B. The share is
    0 without rows, and 1 if all residuals are lost in rounding.
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
    """Refuses `rows` (n, d), those `of` whom, if one has more than the `declared` leverage."""
    _refuse_more("leverage", declared, largest(rows), rows, of, defense)


def require_residual(declared: float, rows: Tensor, of: str, defense: str) -> None:
    """Refuses `rows` (n, d + 1) if one has more than the `declared` share of squared residuals."""
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
    """Returns the largest leverage at which a release by r columns is (`epsilon`, `delta`)-private.

    The release is of coefficients of `d` features by M_LS, or a sketch if `d` is None.

    Raises:
        FedsimError: an argument is out of range, or the leverage is too small to compute.
    """
    if d is None:
        return float(projection.max_leverage(epsilon, delta, r))
    return least_squares.max_leverage(epsilon, delta, r, d)
