"""Error signals of single images, as sparse combinations of a gradient's columns.

Dimitrov, Baader, Müller and Vechev, SPEAR: Exact Gradient Inversion of Batches in Federated
Learning, NeurIPS 2024. Where ReLU follows a layer, ∂L/∂z of an image is 0 at every neuron that the
image does not activate. With N - 1 of such neurons, the kernel of their rows of the gradient's
columns is the image's combination of these. Which neurons they are is not known: rows are drawn,
and what is sparse beyond chance was drawn from one image's zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim_attacks.layer_inputs._answers import Inputs, disaggregated
from fedsim_attacks.layer_inputs._layers import Layer
from fedsim_attacks.layer_inputs._row_space import RowSpace

_NEAR = 1e-3
"""Of a combination's largest entry: what is nearer to 0 may be."""
_ZERO = 5.0
"""Standard deviations of its error, up to which an entry is 0."""
_SAME = 1e-4
"""Sine up to which two combinations are the same."""


def sampled(
    space: RowSpace, number: int, sparsity: float, generator: torch.Generator
) -> Tensor:
    """Draws `number` sets of r - 1 rows; returns combinations (c, r) in their kernels.

    Those whose share of zeros is at least `sparsity`, made precise by all of their zeros.
    """
    rank, rows = space.rank, len(space.columns)
    unit = (space.columns / space.lengths).cpu()
    chosen = torch.rand(number, rows, generator=generator).topk(rank - 1, dim=1).indices
    extra = torch.randn(number, 1, rank, generator=generator, dtype=unit.dtype)
    target = unit.new_zeros(number, rank)
    target[:, -1] = 1
    kernels, broken = torch.linalg.solve_ex(torch.cat([unit[chosen], extra], 1), target)
    kernels = kernels[(broken == 0) & kernels.isfinite().all(1)]
    at = (kernels @ unit.T).abs()
    zeros = at < _NEAR * at.amax(1, keepdim=True)
    enough = zeros.sum(1) >= max(sparsity * rows, rank)
    return torch.stack(
        [torch.linalg.svd(space.columns[row.to(space.columns.device)])[2][-1] for row in zeros[enough]]
        or [space.columns.new_zeros(rank)]
    )[: int(enough.sum())]


class Candidates:
    """Combinations that were found, each once, the sparsest first."""

    def __init__(self, layer: Layer, space: RowSpace) -> None:
        """Begins without any."""
        self.layer = layer
        self.space = space
        self.combinations = space.columns.new_zeros(0, space.rank)

    def add(self, combinations: Tensor) -> bool:
        """Adds what is new; says whether anything is."""
        before = len(self.combinations)
        for each in combinations:
            across = 1 - (self.combinations @ each).square()
            if not bool((across < _SAME**2).any()):
                self.combinations = torch.cat([self.combinations, each[None]])
        zeros = self._off(self.combinations).sum(1)
        self.combinations = self.combinations[zeros.argsort(descending=True, stable=True)]
        return len(self.combinations) > before

    def selected(self) -> tuple[Inputs, float] | None:
        """Selects r of them greedily; returns inputs and their score.

        It begins with the sparsest that are linearly independent, and exchanges one for another as
        long as the score rises. None if there are too few.
        """
        chosen: list[int] = []
        for index in range(len(self.combinations)):
            tried = self.combinations[[*chosen, index]]
            if float(torch.linalg.svdvals(tried)[-1]) > _SAME:
                chosen.append(index)
            if len(chosen) == self.space.rank:
                break
        if len(chosen) < self.space.rank:
            return None
        best = self._scored(chosen)
        improved = True
        while improved and best[1] < 1:
            improved = False
            for place in range(len(chosen)):
                for index in range(len(self.combinations)):
                    if index in chosen:
                        continue
                    other = [*chosen[:place], index, *chosen[place + 1 :]]
                    scored = self._scored(other)
                    if scored[1] > best[1]:
                        chosen, best, improved = other, scored, True
        return best

    def _scored(self, chosen: list[int]) -> tuple[Inputs, float]:
        """Computes inputs; scores them by the share of neurons that are active where they must be.

        An image's error signal is 0 where its own input does not activate a neuron, and only there.
        """
        combinations = self.combinations[chosen]
        inputs = disaggregated(self.layer, self.space, combinations)
        assert self.layer.bias is not None
        active = inputs.values @ self.layer.weights.T + self.layer.bias > 0
        agree = active != self._off(combinations)
        return inputs, float(agree.double().mean().nan_to_num())

    def _off(self, combinations: Tensor) -> Tensor:
        """Says where combinations (c, r) are 0: (c, m)."""
        return (combinations @ self.space.columns.T).abs() < _ZERO * self.space.deviation
