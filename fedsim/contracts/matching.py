"""Decides which reconstruction is meant to be which true image: one bijection per batch.

A gradient is a mean over its batch, so no attack can know the order of the images. Each truth is
therefore paired with one reconstruction of its own by the assignment of least total cost (H. W.
Kuhn, "The Hungarian method for the assignment problem", Naval Research Logistics Quarterly 2,
1955), and every metric of images uses that one assignment. Were each metric to look for its own
best match, or one reconstruction to serve several truths, a single good guess would count as many.
Features have an assignment of their own, for an attack may read them where it draws no image.
"""

from __future__ import annotations

import torch
from torch import Tensor

MISSING = -1
"""Marks a truth without a reconstruction in an assignment."""


def match(reconstruction: Tensor, truth: Tensor) -> list[int]:
    """Assigns reconstructions to truths so that the total mean squared error is least.

    `reconstruction` is (M, ...), `truth` is (N, ...), the same shape but for the first axis. The
    result has N entries: `assignment[i]` is the reconstruction that is scored against truth i.
    Both are finite, on the CPU, and need no gradient.

    If M > N, only the first N reconstructions count: an attack that hands in many guesses must rank
    them itself, for choosing among them by the truth would be an oracle. If M < N, N - M truths
    are left `MISSING` (-1).
    """
    claimed = reconstruction[: len(truth)].flatten(1).double()
    targets = truth.flatten(1).double()
    # The direct form of the distance: the matrix-product form loses small differences.
    distance = torch.cdist(targets, claimed, compute_mode="donot_use_mm_for_euclid_dist")
    # Images without pixels cost nothing, and must not divide by 0.
    cost = distance.square() / max(1, targets.shape[1])
    return assign(cost)


def assign(cost: Tensor) -> list[int]:
    """Returns the column of each row of `cost` (N, M) under the assignment of least total cost.

    A row without a column has `MISSING` (-1). `cost` is on the CPU and holds no NaN.
    """
    if cost.shape == (1, 1):  # without scipy, whose import takes half a second
        return [0]
    from scipy.optimize import linear_sum_assignment

    # Of an (N, M) cost with M < N, only M rows get a column: the others stay `MISSING`.
    rows, columns = linear_sum_assignment(cost.numpy())
    assignment = [MISSING] * len(cost)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        assignment[row] = column
    return assignment


def align(values: Tensor, assignment: list[int], fill: Tensor) -> Tensor:
    """Returns `values` (M, ...) in the order of the truths, (N, ...) on the CPU.

    `assignment` has the index into `values` of each truth. Where it is `MISSING`, `fill` (...)
    stands.
    """
    values = values.detach().cpu()
    fill = fill.detach().cpu().to(values.dtype)
    return torch.stack([fill if k == MISSING else values[k] for k in assignment])
