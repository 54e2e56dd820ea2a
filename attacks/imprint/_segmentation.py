"""Piecewise constant rows: the least-squares segmentation into a given number of pieces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segmentation(NamedTuple):
    """Pieces of rows that are taken to be equal, followed by one that is taken to be zero."""

    ends: list[int]
    """One past the last row of each piece, ascending. From the last one on, rows are zero."""
    residual: Tensor
    """Squared distance of the rows from their pieces' means, and of the last ones from zero."""

    def means(self, rows: Tensor) -> Tensor:
        """Computes the mean row of each piece, and the zero after the last: (pieces + 1, m)."""
        starts = [0, *self.ends]
        pieces = [rows[a:b].mean(0) for a, b in zip(starts, self.ends, strict=False)]
        return torch.stack([*pieces, torch.zeros_like(rows[0])])


def segment(rows: Tensor, pieces: int) -> Segmentation:
    """Finds the best segmentation of `rows` (k, m) into `pieces` <= k, by k² pieces operations.

    By dynamic programming over the end of the last piece (Bellman, On the approximation of curves
    by line segments using dynamic programming, CACM 1961).
    """
    zero = torch.zeros_like(rows[:1])
    sums = torch.cat([zero, rows.cumsum(0)])
    squares = torch.cat([zero[:, 0], rows.square().sum(1).cumsum(0)])
    place = torch.arange(len(sums), device=rows.device)
    length = place[None, :] - place[:, None]
    within = torch.cdist(sums, sums, compute_mode="donot_use_mm_for_euclid_dist").square()
    cost = squares[None, :] - squares[:, None] - within / length.clamp_min(1)
    cost.masked_fill_(length <= 0, torch.inf)  # (start, end) of one piece
    best, came = cost[0], []
    for _ in range(pieces - 1):
        best, start = (best[:, None] + cost).min(0)
        came.append(start)
    total = best + squares[-1] - squares
    ends = [int(total.argmin())]
    for start in reversed(came):
        ends.append(int(start[ends[-1]]))
    return Segmentation(ends[::-1], total.min())
