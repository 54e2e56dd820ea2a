"""SPEAR: inputs of a layer that ReLU follows, exactly, for whole batches.

Dimitrov, Baader, Müller and Vechev, SPEAR: Exact Gradient Inversion of Batches in Federated
Learning, NeurIPS 2024: its algorithms 1 and 2.

Where ReLU follows a layer, ∂L/∂z of an image is 0 at every neuron that it does not activate. With N
- 1 of such neurons, the kernel of their rows of the gradient's columns is the image's combination
of these. Which neurons they are is not known: rows are drawn, and what is sparse beyond chance was
drawn from one image's zeros.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.layer_inputs._cone import sharpen
from fedsim_attacks.layer_inputs._layers import (
    Inputs,
    Layer,
    RowSpace,
    build_answer,
    disaggregate,
    trace_layers,
)

_NEAR = 1e-3  # share of a combination's largest entry below which an entry may be 0
_SHARP, _SHARPER = 1e-6, 0.9  # last width of the weights, and the factor by which it shrinks
_ZERO = 20.0  # standard deviations of an error up to which an entry is 0: large entries round more
_PRECISELY_SAME, _ROUGHLY_SAME = 1e-5, 1e-3
"""Sine up to which two combinations are the same: when they are precise, and before."""


def _sample_kernels(
    space: RowSpace, number: int, sparsity: float, generator: torch.Generator
) -> Tensor:
    """Draws `number` sets of r - 1 neurons; returns sparse combinations (c, r) in their kernels."""
    unit, kernels = _draw_kernels(space, number, generator)
    at = (kernels @ unit.T).abs()
    zeros = at < _NEAR * at.amax(1, keepdim=True)
    # r - 1 of the zeros were drawn: only more of them say anything.
    enough = zeros.sum(1) >= max(sparsity * len(unit), space.rank)
    return _sharpen_kernels(space, kernels[enough], sparsity)


def _descend_kernels(
    space: RowSpace, number: int, sparsity: float, generator: torch.Generator
) -> Tensor:
    """Descends from kernels as `_sample_kernels` draws them to sparse combinations (c, r)."""
    # Iteratively reweighted least squares, whose weights sharpen as it goes on (Chartrand and Yin,
    # Iteratively Reweighted Algorithms for Compressive Sensing, ICASSP 2008).
    unit, kernels = _draw_kernels(space, number, generator)
    at = kernels @ unit.T
    width = at.abs().median(1, keepdim=True).values
    while len(width) and float(width.max()) > _SHARP:
        width = _SHARPER * width
        weighted = unit / (at.square() + width.square()).sqrt()[..., None]
        # The unit vector of least weighted sum of squares is the first eigenvector.
        kernels = torch.linalg.eigh(weighted.transpose(1, 2) @ weighted)[1][:, :, 0]
        at = kernels @ unit.T
    enough = (at.abs() < 10 * _SHARP).sum(1) >= max(sparsity * len(unit), space.rank)
    return _sharpen_kernels(space, kernels[enough], sparsity)


def _draw_kernels(
    space: RowSpace, number: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws sets of r - 1 of the unit rows (m, r); returns all rows and the kernels (s, r)."""
    rank, unit = space.rank, (space.columns / space.lengths).cpu()
    chosen = torch.rand(number, len(unit), generator=generator).topk(rank - 1, dim=1).indices
    extra = torch.randn(number, 1, rank, generator=generator, dtype=unit.dtype)
    target = unit.new_zeros(number, rank)
    target[:, -1] = 1
    # r - 1 rows and a random one: the solution is orthogonal to the former, their kernel.
    kernels, broken = torch.linalg.solve_ex(torch.cat([unit[chosen], extra], 1), target)
    found = kernels[(broken == 0) & kernels.isfinite().all(1)]
    return unit, found / found.norm(dim=1, keepdim=True)


def _sharpen_kernels(space: RowSpace, kernels: Tensor, sparsity: float) -> Tensor:
    """Makes `kernels` (s, r) precise combinations (c, r) of the gradient's columns, each once."""
    found = space.columns.new_zeros(0, space.rank)
    surely = int(sparsity * len(space.columns))
    for kernel in kernels:
        start = (kernel / space.lengths.cpu()).to(space.columns)
        if _is_new(start / start.norm(), found, _ROUGHLY_SAME):
            precise = sharpen(start, space.columns.T, space.deviation, surely)
            if precise is not None:
                found = torch.cat([found, precise[0][None]])
    return found


def _is_new(each: Tensor, others: Tensor, sine: float) -> bool:
    """Says whether `each` (r,) differs from all `others` (c, r), all of unit length."""
    across = (each[None] - (others @ each)[:, None] * others).norm(dim=1)
    return not bool((across < sine).any())


class _SpearState(AttackState):
    """The combinations found so far, and the best selection among them."""

    def __init__(self, observation: Observation, layer: Layer, rng: torch.Generator) -> None:
        super().__init__(loss=torch.ones(()))
        self.observation, self.layer, self.rng = observation, layer, rng
        self.space = RowSpace.decompose(layer, observation.num_images)
        self.combinations = self.space.columns.new_zeros(0, self.space.rank)
        """(c, r) of the gradient's columns, each once, the sparsest first."""
        self.known = 0
        """Number of combinations at the last selection."""
        self.best: Inputs | None = None
        self.score = 0.0
        """Share of neurons and images that agree with `best`, in [0, 1]."""

    def add(self, combinations: Tensor) -> None:
        """Adds the new ones among unit `combinations` (c, r), and sorts all by their zeros."""
        for each in combinations:
            if _is_new(each, self.combinations, _PRECISELY_SAME):
                self.combinations = torch.cat([self.combinations, each[None]])
        zeros = self._are_zero(self.combinations).sum(1)
        self.combinations = self.combinations[zeros.argsort(descending=True, stable=True)]

    def select(self) -> tuple[Inputs, float] | None:
        """Selects r combinations greedily; returns their inputs and score, or None of too few."""
        chosen: list[int] = []
        for index in range(len(self.combinations)):
            tried = self.combinations[[*chosen, index]]
            # Dependent combinations would leave images that cannot be told apart.
            if float(torch.linalg.svdvals(tried)[-1]) > _PRECISELY_SAME:
                chosen.append(index)
            if len(chosen) == self.space.rank:
                break
        if len(chosen) < self.space.rank:
            return None
        best = self._score(chosen)
        improved = True
        while improved and best[1] < 1:
            improved = False
            for place in range(len(chosen)):
                for index in range(len(self.combinations)):
                    if index in chosen:
                        continue
                    other = [*chosen[:place], index, *chosen[place + 1 :]]
                    scored = self._score(other)
                    if scored[1] > best[1]:
                        chosen, best, improved = other, scored, True
        return best

    def _score(self, chosen: list[int]) -> tuple[Inputs, float]:
        """Computes inputs, and the share of neurons that are active where they must be."""
        combinations = self.combinations[chosen]
        inputs = disaggregate(self.layer, self.space, combinations)
        assert self.layer.bias is not None
        active = inputs.values @ self.layer.weights.T + self.layer.bias > 0
        # ReLU: an error signal is 0 exactly where the input leaves the neuron off.
        agree = active != self._are_zero(combinations)
        return inputs, float(agree.double().mean().nan_to_num())

    def _are_zero(self, combinations: Tensor) -> Tensor:
        return (combinations @ self.space.columns.T).abs() < _ZERO * self.space.deviation


_TOGETHER = 4096  # sets of rows that are drawn in one iteration
_DESCENTS = 64  # descents of one iteration
_COMPLETE = 0.999  # score from which on all neurons agree, but for some that rounding leaves open


@final
class Spear(IterativeAttack[_SpearState]):
    """Recovers a layer's inputs by the zeros that ReLU leaves in error signals of its gradient.

    The layer is the first linear one with a bias that ReLU follows. The number of draws needed
    doubles with each image. Inputs of a first layer are the images.
    """

    on_processor: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Dimitrov et al., SPEAR, NeurIPS 2024, algorithms 1 and 2; `search: descent` is fedsim's"
    )

    iterations: Annotated[int, Field(ge=1)] = 1000
    """Iterations of 4,096 sets of neurons each; it ends when 99.9% of neurons agree with the
    inputs."""
    search: Literal["sampled", "descent"] = "sampled"
    """`sampled`: as the paper does. `descent`: 64 sets of neurons are drawn instead, and also
    descended from. That is not the paper's, and its cost does not double with each image."""
    sparsity: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of an error signal's entries that have to be 0. The paper chooses its own by the share
    of images that it may reject in an untrained network (1 in 100,000; not checked in its text). In
    a trained one images activate more."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _SpearState:
        """Decomposes a layer; AttackFailed without one of bias and ReLU. See `Attack.init`."""
        layers = [
            layer
            for layer in trace_layers(observation)
            if layer.rectified and layer.bias is not None and layer.features is not None
        ]
        if not layers:
            raise AttackFailed("the model has no linear layer with a bias that ReLU follows")
        return _SpearState(observation, layers[0], rng)

    def step(self, state: _SpearState) -> _SpearState:
        """Draws sets of neurons, and chooses inputs by what they tell. See `Attack.step`."""
        state.iteration += 1
        number, before = _TOGETHER, state.known
        if self.search == "descent":
            number = _DESCENTS
            state.add(_descend_kernels(state.space, number, self.sparsity, state.rng))
        state.add(_sample_kernels(state.space, number, self.sparsity, state.rng))
        state.known = len(state.combinations)
        if state.known > before:
            selected = state.select()
            if selected is not None and selected[1] > state.score:
                state.best, state.score = selected
                state.loss = torch.tensor(1 - state.score)
        return state

    def terminate(self, state: _SpearState) -> bool:
        """Returns whether 99.9% of neurons agree with the inputs, or all `iterations` are made."""
        return state.score >= _COMPLETE or super().terminate(state)

    def postprocess(self, state: _SpearState) -> Reconstruction:
        """Returns features (N, d), their mean where not found, labels and images if inputs tell.

        An AttackFailed says that too few sparse combinations were found.
        """
        inputs = state.best
        if inputs is None:
            raise AttackFailed(
                f"{state.known} of {state.space.rank} sparse combinations were found: raise "
                "iterations, or observe smaller batches"
            )
        if state.score < _COMPLETE:
            # A selection that contradicts some neuron is an answer, but none is determined.
            inputs.errors.fill_(torch.inf)
        pixels = inputs if inputs.layer.pixels else None
        return build_answer(state.observation, inputs, pixels, state.iteration)
