"""Inputs that are never negative, as the extreme rays of a cone.

A layer's inputs after ReLU are points of the row space of its gradient without a negative entry.
All such points are a cone. An input with zeros at entries that leave no other direction of the row
space is one of its extreme rays, and these are solutions of linear programs: the least weighted sum
of entries, over the points of the cone at which a linear function is 1, is taken at one of them. A
function that is 0 at all inputs found so far leads to another; which one, is up to the weights,
which are drawn. An extreme ray that is no input has zeros by coincidence, without each of which it
would be none; an input has more zeros than are needed.

That is how non-negative matrix factorization is unique (Donoho and Stodden, When Does Non-Negative
Matrix Factorization Give a Correct Decomposition into Parts?, NeurIPS 2003).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from fedsim_attacks.layer_inputs._sharpening import sharpened

_NEGATIVE = 10.0
"""Standard deviations of its error, down to which an entry may be negative."""
_FEWEST = 0.05
"""Share of its entries that an input has zeros at least, besides those of any extreme ray."""
_FRUITLESS = 12
"""Draws without a new input, after which there will be none."""
_REWEIGHTED = 3
"""Times that a linear program is tried again with other weights."""
_NEAR = 0.1
"""Of the mean entry: what is nearer to 0 than that weighs alike."""
_SLACK = 1e-8
"""How far below 0 entries may be: solvers round."""
_SAME = 1e-3
"""Relative distance up to which two rays are the same."""


@dataclass(frozen=True)
class Rays:
    """Inputs as combinations of the rows of a row space."""

    combinations: Tensor
    """(k, r), of unit length."""
    spread: Tensor
    """(k,): standard deviation of the error of an input, all its entries together."""
    tried: int
    """Linear programs that were solved."""


def extreme_rays(
    entries: Tensor, rows: Tensor, deviation: float, generator: torch.Generator
) -> Rays:
    """Finds combinations of `rows` whose `entries` are non-negative, many of them 0.

    Args:
        entries: (r, e), linear in the rows: what must not be negative.
        rows: (r, n) whose entries have errors of `deviation` and no less.
        deviation: of an entry of either.
        generator: draws linear functions.
    """
    rank = len(entries)
    if rank == 1:  # the only ray, whether it has zeros or not
        error = deviation * rows.shape[1] ** 0.5
        return Rays(entries.sum(1, keepdim=True).sign(), rows.new_tensor([error]), 0)
    alive = entries.norm(dim=0) > 10 * deviation * rank**0.5
    cone = entries[:, alive].cpu()
    energy = rows.square().sum(1).sqrt().cpu()
    search = _Search(cone, energy, deviation)
    found: list[Tensor] = []
    spread: list[float] = []
    fruitless = 0
    while len(found) < rank and fruitless < _FRUITLESS:
        fruitless += 1
        aim = torch.randn(rank, generator=generator, dtype=torch.float64)
        if found:
            known = torch.stack(found) * energy
            known = known / known.norm(dim=1, keepdim=True)
            aim -= torch.linalg.pinv(known) @ (known @ aim)
        aim = aim / aim.norm()
        weights = torch.rand(cone.shape[1], generator=generator, dtype=torch.float64)
        reached = search.sparse_ray(aim, weights) or search.sparse_ray(-aim, weights)
        if reached is None:
            continue
        combination, zeros = reached
        ray = combination @ rows.cpu()
        if any(_apart(ray, other @ rows.cpu()) < _SAME for other in found):
            continue
        inverse = torch.linalg.pinv(zeros @ zeros.T, rcond=1e-14)
        variance = float((energy.square() * inverse.diagonal()).sum())
        spread.append(deviation * (variance + rows.shape[1]) ** 0.5)
        found.append(combination)
        fruitless = 0
    combinations = torch.stack(found) if found else cone.new_zeros(0, rank)
    return Rays(combinations.to(rows), rows.new_tensor(spread), search.programs)


@dataclass
class _Search:
    """Linear programs over the points of a cone at which a linear function is 1."""

    cone: Tensor
    """(r, e)."""
    energy: Tensor
    """(r,): lengths of the rows, by which variables are scaled."""
    deviation: float
    programs: int = 0
    """How many were solved."""

    def sparse_ray(self, aim: Tensor, weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns an input (r,) at which `aim` (r,) is positive, and the cone at its zeros (r, z).

        The sum of its entries with `weights` (e,) is least, or nearly so: where a program ends at
        an extreme ray that is no input, the next one weighs entries by how near to 0 they were
        (Candès, Wakin and Boyd, Enhancing Sparsity by Reweighted l1 Minimization, 2008).
        """
        scaled = self.cone / self.energy[:, None]
        for _ in range(_REWEIGHTED + 1):
            self.programs += 1
            solved = linprog(
                (scaled @ weights).numpy(),
                A_ub=-scaled.T.numpy(),
                b_ub=np.full(scaled.shape[1], _SLACK),
                A_eq=aim[None].numpy(),
                b_eq=[1.0],
                bounds=(None, None),
                method="highs",
            )
            if solved.x is None:
                return None
            solution = torch.from_numpy(solved.x)
            precise = _polished(solution / self.energy, self.cone, self.deviation)
            if precise is not None:
                return precise
            at = (solution @ scaled).clamp_min(0)
            weights = _NEAR * at.mean() / (at + _NEAR * at.mean())
        return None


def _polished(start: Tensor, cone: Tensor, deviation: float) -> tuple[Tensor, Tensor] | None:
    """Makes a combination (r,) precise; returns it and the cone at its zeros (r, z).

    None if others are negative, or one of the zeros does not follow from the rest.
    """
    surely = len(cone) - 1 + int(_FEWEST * cone.shape[1])
    precise = sharpened(start, cone, deviation, surely)
    if precise is None:
        return None
    combination, zeros = precise[0], cone[:, precise[1]]
    combination = combination * (combination @ cone).sum().sign()
    at = combination @ cone
    return None if float(at.min()) < -_NEGATIVE * deviation else (combination, zeros)


def _apart(first: Tensor, second: Tensor) -> float:
    return float((first / first.norm() - second / second.norm()).norm())
