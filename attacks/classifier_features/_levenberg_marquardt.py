"""Nonlinear least squares from many starting points at once (Levenberg, 1944; Marquardt, 1963)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_FIRST_DAMPING = 1e-2
"""Of the diagonal of J'J, at the start."""
_EASED, _RAISED = 0.2, 3.0
"""Times the damping after a step that lowered the sum of squares, and after one that did not."""
_DAMPING = (1e-12, 1e8)
"""Least and largest damping."""
_FLAT = 1e-12
"""Least entry of the diagonal, over the largest: directions that the residual does not see."""

Batched = Callable[[Tensor, Tensor], Tensor]
"""From points (S, n) and what belongs to their starts, to residuals (S, e), or Jacobians
(S, e, n)."""
Normals = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From points (S, n), what belongs to their starts, and residuals r (S, e), to J'J (S, n, n) and
J'r (S, n)."""


def normals_of(jacobians: Batched) -> Normals:
    """Returns J'J and J'r by the Jacobians J themselves."""

    def normals(points: Tensor, given: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        slopes = jacobians(points, given).transpose(1, 2)
        return slopes @ slopes.transpose(1, 2), (slopes @ left[..., None])[..., 0]

    return normals


class Minima(NamedTuple):
    """Where descents from several starts have come to."""

    points: Tensor
    """(S, n)."""
    losses: Tensor
    """(S,): the sums of squares there."""


def minimize(
    residuals: Batched,
    normals: Normals,
    starts: Tensor,
    given: Tensor,
    iterations: int,
    enough: float = 0.0,
) -> Minima:
    """Descends the squared norm of `residuals` from each of `starts`.

    Args:
        residuals: of points and their entries of `given`.
        normals: of the same.
        starts: (S, n) float64.
        given: (S, ...), constant.
        iterations: steps that are tried at most; fewer where none lowers any start's.
        enough: sum of squares below which the first start to come ends the descent of all.
    """
    points = starts
    damping = starts.new_full((len(starts),), _FIRST_DAMPING)
    there = residuals(points, given)
    losses = there.square().sum(1)
    if not starts.shape[1]:
        return Minima(points, losses)
    for _ in range(iterations):
        if bool((losses < enough).any()) or bool((damping >= _DAMPING[1]).all()):
            break
        normal, downhill = normals(points, given, there)
        diagonal = normal.diagonal(dim1=1, dim2=2)
        floor = _FLAT * diagonal.amax(1, keepdim=True) + torch.finfo(starts.dtype).tiny
        damped = normal + torch.diag_embed(damping[:, None] * (diagonal + floor))
        step, broken = torch.linalg.solve_ex(damped, downhill)
        tried = points - step
        left = residuals(tried, given)
        reached = left.square().sum(1)
        better = (reached < losses) & (broken == 0)
        points = torch.where(better[:, None], tried, points)
        there = torch.where(better[:, None], left, there)
        losses = torch.where(better, reached, losses)
        damping = torch.where(better, _EASED * damping, _RAISED * damping).clamp(*_DAMPING)
    return Minima(points, losses)
