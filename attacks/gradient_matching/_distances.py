"""Distances of a recomputed update from the observed one, each with its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDING = 1e-11
"""Share of the update's energy below which a tensor is rounding."""


@dataclass(frozen=True)
class Target:
    """The observed update, in the parts that candidates can reach."""

    tensors: list[Tensor]
    square: Tensor
    """|t|² of the whole update (0-d)."""
    outside: Tensor
    """|t|² of the entries that are zero in every recomputed update and left out (0-d)."""


Distance = Callable[[Sequence[Tensor], Target], tuple[Tensor, list[Tensor], Tensor]]
"""(update, target) -> (distance (0-d), direction, scale (0-d)): the derivative of the distance in
the update is scale * direction. Closed forms: autograd would keep a graph of them."""


def cosine_distance(
    update: Sequence[Tensor], target: Target
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Computes 1 - <u, t> / (|u| |t|) over all parameters (Geiping et al. 2020, equation 4)."""
    product, square = inner_product(update, target.tensors), inner_product(update, update)
    norms = square.sqrt() * target.square.sqrt()
    similarity = product / norms
    pull = -product / square
    direction = [torch.addcmul(t, u, pull) for u, t in zip(update, target.tensors, strict=True)]
    return 1 - similarity, direction, -1 / norms


def squared_distance(
    update: Sequence[Tensor], target: Target
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Computes |u - t|² / |t|²: equation 4 of Zhu et al. 2019 in units of the observed update."""
    direction = [u - t for u, t in zip(update, target.tensors, strict=True)]
    distance = (inner_product(direction, direction) + target.outside) / target.square
    return distance, direction, 2 / target.square


def reweighted_cosine(weights: Sequence[float]) -> Distance:
    """Makes Σ_i w_i (1 - cos(u_i, t_i)) / Σ_i w_i over the tensors of the update.

    Liu et al., Appendix D, weigh each tensor by its number of non-zero parameters. A tensor whose
    observed gradient is nothing but rounding (a bias before batch norm) has no direction, and does
    not count.
    """

    def distance(update: Sequence[Tensor], target: Target) -> tuple[Tensor, list[Tensor], Tensor]:
        losses, direction = [], []
        counted = [
            weight * (t.square().sum() > _ROUNDING * target.square)
            for weight, t in zip(weights, target.tensors, strict=True)
        ]
        total = torch.stack(counted).sum()
        for weight, u, t in zip(counted, update, target.tensors, strict=True):
            tiny = torch.finfo(u.dtype).tiny
            lengths = (u.square().sum() * t.square().sum()).sqrt().clamp_min(tiny)
            cosine = (u * t).sum() / lengths
            along = cosine / u.square().sum().clamp_min(tiny)
            losses.append(weight / total * (1 - cosine))
            direction.append(weight / total * (u * along - t / lengths))
        return torch.stack(losses).sum(), direction, losses[0].new_ones(())

    return distance


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    products = [torch.dot(_flat(x), _flat(y)) for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum()


def _flat(tensor: Tensor) -> Tensor:
    # In the order in which channels-last weights lie in memory: a view, not a copy.
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).flatten()
