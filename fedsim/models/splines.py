"""Computes B-spline bases on [-1, 1] with uniform knots, as differentiable tensor functions.

Source: de Boor, A Practical Guide to Splines, Springer 1978, chapter X (the recursion of Cox and
de Boor, which only ever adds positive terms).
"""

from __future__ import annotations

import torch
from torch import Tensor


def basis_size(degree: int, intervals: int) -> int:
    """Returns the number of basis functions of `degree` over `intervals` pieces of [-1, 1]."""
    return intervals + degree


def spline_basis(x: Tensor, degree: int, intervals: int) -> Tensor:
    """Evaluates every basis function of `degree` at `x`: (...,) -> (..., intervals + degree).

    x is in [-1, 1], which is cut into `intervals` equal pieces. The knots continue evenly beyond,
    so that the functions are non-negative, sum to 1 and are degree - 1 times continuously
    differentiable. The pieces are half-open, the last one closed.
    """
    position = (x + 1) * (intervals / 2)  # in units of a piece, 0 to `intervals`
    # The piece is constant almost everywhere: it carries no gradient. The clamp closes the last
    # one.
    piece = position.detach().floor().clamp(0, intervals - 1)
    # knot j lies at j - degree; of degree 0 there are functions for all pieces that reach in
    start = torch.arange(-degree, intervals + degree, device=x.device, dtype=x.dtype)
    basis = (piece[..., None] == start).to(x.dtype)
    position = position[..., None]
    for order in range(1, degree + 1):
        # Function j rises from its first knot on, and falls to zero order + 1 knots later.
        rise = (position - start[:-order]) / order
        fall = (start[order:] + 1 - position) / order
        basis = rise * basis[..., :-1] + fall * basis[..., 1:]
    return basis
