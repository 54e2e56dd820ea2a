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
    square = square.clamp_min(torch.finfo(square.dtype).tiny)
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


def reweighted_cosine(weights: Sequence[float], *, summed: bool = False) -> Distance:
    """Makes Σ_i w_i (1 - cos(u_i, t_i)) over the tensors of the update, over Σ_i w_i if not summed.

    Liu et al., Appendix D, sum and weigh each tensor by its number of non-zero parameters; where
    all that count have none, as a classifier that starts at zero, entries weigh alike. A tensor
    whose observed gradient is nothing but rounding (a bias before batch norm) has no direction, and
    does not count.
    """

    def distance(update: Sequence[Tensor], target: Target) -> tuple[Tensor, list[Tensor], Tensor]:
        losses, direction = [], []
        told = [t.square().sum() > _ROUNDING * target.square for t in target.tensors]
        counted = torch.stack([weight * each for weight, each in zip(weights, told, strict=True)])
        sizes = [t.numel() * each for t, each in zip(target.tensors, told, strict=True)]
        counted = torch.where(counted.sum() > 0, counted, torch.stack(sizes))
        total = counted.new_ones(()) if summed else counted.sum()
        for weight, u, t in zip(counted, update, target.tensors, strict=True):
            square, lengths = _lengths(u, t)
            cosine = (u * t).sum() / lengths
            along = cosine / square
            losses.append(weight / total * (1 - cosine))
            direction.append(weight / total * (u * along - t / lengths))
        return torch.stack(losses).sum(), direction, losses[0].new_ones(())

    return distance


def _lengths(u: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Computes |u|² and |u| |t|, neither of them less than their product can be in that type."""
    tiny = torch.finfo(u.dtype).tiny
    square, wanted = (each.square().sum().clamp_min(tiny) for each in (u, t))
    both = square * wanted
    # Of a network that is sure of its images the product underflows, and its factors do not.
    lengths = torch.where(
        both > tiny / torch.finfo(u.dtype).eps, both.sqrt(), square.sqrt() * wanted.sqrt()
    )
    return square, lengths


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    products = [torch.dot(_flat(x), _flat(y)) for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum()


def _flat(tensor: Tensor) -> Tensor:
    # In the order in which channels-last weights lie in memory: a view, not a copy.
    return (tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).flatten()
