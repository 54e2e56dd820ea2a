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
from fedsim_attacks.layer_inputs._cone import sharpened
from fedsim_attacks.layer_inputs._layers import Layer
from fedsim_attacks.layer_inputs._row_space import RowSpace

_NEAR = 1e-3
"""Of a combination's largest entry: what is nearer to 0 may be."""
_SHARP, _SHARPER = 1e-6, 0.9
"""Width of the weights in the end, and by which factor it shrinks in an iteration."""
_ZERO = 20.0
"""Standard deviations of an error, up to which an entry is 0: rounding errs more where entries are
larger."""
_SAME, _ALIKE = 1e-5, 1e-3
"""Sine up to which two combinations are the same: when they are precise, and before."""


def sampled(space: RowSpace, number: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Draws `number` sets of r - 1 rows; returns combinations (c, r) in their kernels.

    Those whose share of zeros is at least `sparsity`, made precise by all of their zeros.
    """
    rank, rows = space.rank, len(space.columns)
    unit = (space.columns / space.lengths).cpu()
    chosen = torch.rand(number, rows, generator=generator).topk(rank - 1, dim=1).indices
    kernels = _kernels(unit, chosen, generator)
    at = (kernels @ unit.T).abs()
    zeros = at < _NEAR * at.amax(1, keepdim=True)
    enough = zeros.sum(1) >= max(sparsity * rows, rank)
    return _sharpened(space, kernels[enough], sparsity)


def descended(space: RowSpace, number: int, sparsity: float, generator: torch.Generator) -> Tensor:
    """Descends from the kernels of `number` sets of r - 1 rows to sparse combinations (c, r).

    By iteratively reweighted least squares, whose weights sharpen from iteration to iteration
    (Chartrand and Yin, Iteratively Reweighted Algorithms for Compressive Sensing, ICASSP 2008).
    """
    rank, rows = space.rank, len(space.columns)
    unit = (space.columns / space.lengths).cpu()
    chosen = torch.rand(number, rows, generator=generator).topk(rank - 1, dim=1).indices
    kernels = _kernels(unit, chosen, generator)
    at = kernels @ unit.T
    width = at.abs().median(1, keepdim=True).values
    while len(width) and float(width.max()) > _SHARP:
        width = _SHARPER * width
        weighted = unit / (at.square() + width.square()).sqrt()[..., None]
        kernels = torch.linalg.eigh(weighted.transpose(1, 2) @ weighted)[1][:, :, 0]
        at = kernels @ unit.T
    enough = (at.abs() < 10 * _SHARP).sum(1) >= max(sparsity * rows, rank)
    return _sharpened(space, kernels[enough], sparsity)


def _kernels(unit: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Computes the kernels (s, r) of sets of r - 1 rows, `chosen` (s, r - 1) from `unit` (m, r)."""
    number, rank = len(chosen), unit.shape[1]
    extra = torch.randn(number, 1, rank, generator=generator, dtype=unit.dtype)
    target = unit.new_zeros(number, rank)
    target[:, -1] = 1
    kernels, broken = torch.linalg.solve_ex(torch.cat([unit[chosen], extra], 1), target)
    found = kernels[(broken == 0) & kernels.isfinite().all(1)]
    scaled: Tensor = found / found.norm(dim=1, keepdim=True)
    return scaled


def _sharpened(space: RowSpace, kernels: Tensor, sparsity: float) -> Tensor:
    """Makes `kernels` (s, r) precise combinations (c, r) of the gradient's columns, each once."""
    found = space.columns.new_zeros(0, space.rank)
    surely = int(sparsity * len(space.columns))
    for kernel in kernels:
        start = (kernel / space.lengths.cpu()).to(space.columns)
        if _is_new(start / start.norm(), found, _ALIKE):
            precise = sharpened(start, space.columns.T, space.deviation, surely)
            if precise is not None:
                found = torch.cat([found, precise[0][None]])
    return found


def _is_new(each: Tensor, others: Tensor, sine: float) -> bool:
    """Says whether `each` (r,) differs from all `others` (c, r), all of unit length."""
    across = (each[None] - (others @ each)[:, None] * others).norm(dim=1)
    return not bool((across < sine).any())


class Candidates:
    """Combinations that were found, each once, the sparsest first."""

    def __init__(self, layer: Layer, space: RowSpace) -> None:
        """Begins without any."""
        self.layer = layer
        self.space = space
        self.combinations = space.columns.new_zeros(0, space.rank)

    def add(self, combinations: Tensor) -> None:
        """Adds what is new."""
        for each in combinations:
            if _is_new(each, self.combinations, _SAME):
                self.combinations = torch.cat([self.combinations, each[None]])
        zeros = self._off(self.combinations).sum(1)
        self.combinations = self.combinations[zeros.argsort(descending=True, stable=True)]

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
