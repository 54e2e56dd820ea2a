"""A combination of vectors made precise by the entries of it that are 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ESSENTIAL = 0.99
"""Leverage of a zero from which on it does not follow from the others."""
_NARROWER, _LAST = 0.3, 6
"""Factor by which the width of the weights shrinks, and iterations at its least: a start may be
nearer to other zeros than errors are."""
ZERO = 4.0
"""Standard deviations of its error, up to which an entry may be 0."""


def sharpened(
    start: Tensor, vectors: Tensor, deviation: float, surely: int
) -> tuple[Tensor, Tensor] | None:
    """Fits a combination (r,) to all entries that are 0; returns it and which they are (e,).

    Entries count the more, the nearer they are to 0 (iteratively reweighted least squares), down to
    their errors. None if one of the zeros does not follow from the others: then it may be one
    of the coincidences that any combination can be made to have.

    Args:
        start: (r,), near it.
        vectors: (r, e) that are combined.
        deviation: of the error of each of their entries.
        surely: how many of the smallest entries are 0.
    """
    combination = start / start.norm()
    at = combination @ vectors
    width = float(at.abs().sort()[0][min(surely, len(at) - 1)])
    width = max(width, deviation)
    for _ in range(_LAST + math.ceil(math.log(width / deviation) / -math.log(_NARROWER))):
        width = max(_NARROWER * width, deviation)
        weighted = vectors / (at.square() + width**2).sqrt()
        combination = torch.linalg.svd(weighted, full_matrices=False)[0][:, -1]
        at = combination @ vectors
    zeros = at.abs() < ZERO * deviation
    if int(zeros.sum()) < len(vectors):
        return None
    left, _, right = torch.linalg.svd(vectors[:, zeros], full_matrices=False)
    if float(right[:-1].square().sum(0).max()) > _ESSENTIAL:
        return None
    return left[:, -1], zeros
