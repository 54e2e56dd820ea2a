"""Nonlinear least squares from many starting points at once (Levenberg, 1944; Marquardt, 1963)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jacfwd, vmap

_FIRST_DAMPING = 1e-2
"""Of the diagonal of J'J, at the start."""
_EASED, _RAISED = 0.2, 3.0
"""Times the damping after a step that lowered the sum of squares, and after one that did not."""
_DAMPING = (1e-12, 1e8)
"""Least and largest damping."""
_FLAT = 1e-12
"""Least entry of the diagonal, over the largest: directions that the residual does not see."""

Residual = Callable[[Tensor, Tensor], Tensor]
"""From one point (n,) and what belongs to its start, to the residual (e,)."""

Slopes = Callable[[Tensor, Tensor], Tensor]
"""From points (S, n) and what belongs to their starts, to the Jacobians (S, e, n)."""


class Minima(NamedTuple):
    """Where descents from several starts have come to."""

    points: Tensor
    """(S, n)."""
    losses: Tensor
    """(S,): the sums of squares there."""


def minimize(
    residual: Residual,
    starts: Tensor,
    given: Tensor,
    iterations: int,
    slopes: Slopes | None = None,
) -> Minima:
    """Descends the squared norm of `residual` from each of `starts`.

    Args:
        residual: of one point and its entry of `given`.
        starts: (S, n) float64.
        given: (S, ...), handed to `residual`, and constant.
        iterations: steps that are tried, the same for all starts.
        slopes: of `residual` at all starts; None: they are differentiated.
    """
    values, slopes = vmap(residual), slopes or vmap(jacfwd(residual))
    points = starts
    damping = starts.new_full((len(starts),), _FIRST_DAMPING)
    residuals = values(points, given)
    losses = residuals.square().sum(1)
    if not starts.shape[1]:
        return Minima(points, losses)
    for _ in range(iterations):
        jacobian = slopes(points, given)
        normal = jacobian.transpose(1, 2) @ jacobian
        diagonal = normal.diagonal(dim1=1, dim2=2)
        floor = _FLAT * diagonal.amax(1, keepdim=True) + torch.finfo(starts.dtype).tiny
        damped = normal + torch.diag_embed(damping[:, None] * (diagonal + floor))
        downhill = (jacobian.transpose(1, 2) @ residuals[..., None])[..., 0]
        step, broken = torch.linalg.solve_ex(damped, downhill)
        tried = points - step
        there = values(tried, given)
        reached = there.square().sum(1)
        better = (reached < losses) & (broken == 0)
        points = torch.where(better[:, None], tried, points)
        residuals = torch.where(better[:, None], there, residuals)
        losses = torch.where(better, reached, losses)
        damping = torch.where(better, _EASED * damping, _RAISED * damping).clamp(*_DAMPING)
    return Minima(points, losses)
