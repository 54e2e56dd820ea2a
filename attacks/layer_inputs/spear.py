"""SPEAR: inputs of a layer that ReLU follows, exactly, for whole batches.

Dimitrov, Baader, Müller and Vechev, SPEAR: Exact Gradient Inversion of Batches in Federated
Learning, NeurIPS 2024: its algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field

from fedsim.contracts.attack import AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import IterativeAttack
from fedsim_attacks.layer_inputs._answers import Inputs, reconstruction
from fedsim_attacks.layer_inputs._layers import traced
from fedsim_attacks.layer_inputs._row_space import RowSpace
from fedsim_attacks.layer_inputs._sparse_columns import Candidates, descended, sampled

_TOGETHER = 4096
"""Sets of rows that are drawn in one iteration."""
_DESCENTS = 64
"""Descents of one iteration."""
_COMPLETE = 0.999
"""Score from which on all neurons agree, but for some that rounding leaves open."""


@dataclass(kw_only=True)
class Sampling(AttackState):
    """The combinations found so far, and the best selection among them."""

    observation: Observation
    candidates: Candidates
    rng: torch.Generator
    best: Inputs | None = None
    score: float = 0.0
    known: int = 0
    """Combinations that were known when it was selected from them."""


@final
class Spear(IterativeAttack[Sampling]):
    """Takes a layer's gradient apart by the zeros that ReLU leaves in error signals.

    The layer is the first linear one with a bias that ReLU follows. Sets of its neurons are drawn
    until combinations of its gradient's columns are found that are sparse, and a greedy selection
    of them reproduces which neurons each image activates. How many it takes doubles with each
    image. Inputs of a first layer are the images.
    """

    on_processor: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Dimitrov et al., SPEAR, NeurIPS 2024, algorithms 1 and 2; `search: descent` is fedsim's"
    )

    iterations: Annotated[int, Field(ge=1)] = 1000
    """Of 4,096 sets of neurons each; it ends when all neurons agree."""
    search: Literal["sampled", "descent"] = "sampled"
    """`sampled`: as the paper does. `descent`: 64 sets of neurons are drawn instead, and also
    descended from, which is not the paper's; what it takes does not double with each image."""
    sparsity: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of a combination's entries that have to be 0. The paper takes what fewer of 1 in
    100,000 images of an untrained network have; of a trained one images activate more."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Sampling:
        """Decomposes the layer's gradient.

        Raises:
            AttackFailed: the model has no such layer, it is smaller than the batch, or a defense
                has left nothing of its gradient's row space.
        """
        layers = [
            layer
            for layer in traced(observation)
            if layer.rectified and layer.bias is not None and layer.features is not None
        ]
        if not layers:
            raise AttackFailed("the model has no linear layer with a bias that ReLU follows")
        space = RowSpace.of(layers[0], observation.num_images)
        return Sampling(
            loss=torch.ones(()),
            observation=observation,
            candidates=Candidates(layers[0], space),
            rng=rng,
        )

    def step(self, state: Sampling) -> Sampling:
        """Draws sets of neurons, and selects anew if combinations have been found."""
        state.iteration += 1
        candidates = state.candidates
        number = _TOGETHER
        if self.search == "descent":
            number = _DESCENTS
            candidates.add(descended(candidates.space, number, self.sparsity, state.rng))
        found = sampled(candidates.space, number, self.sparsity, state.rng)
        before = state.known
        candidates.add(found)
        state.known = len(candidates.combinations)
        if state.known > before:
            selected = candidates.selected()
            if selected is not None and selected[1] > state.score:
                state.best, state.score = selected
                state.loss = torch.tensor(1 - state.score)
        return state

    def terminate(self, state: Sampling) -> bool:
        """Says whether all neurons agree, or `iterations` are over."""
        return state.score >= _COMPLETE or super().terminate(state)

    def postprocess(self, state: Sampling) -> Reconstruction:
        """Returns what the inputs tell of the images.

        Raises:
            AttackFailed: too few combinations have been found.
        """
        inputs = state.best
        if inputs is None:
            found = len(state.candidates.combinations)
            raise AttackFailed(
                f"{found} of {state.candidates.space.rank} sparse combinations were found: raise "
                "iterations, or observe smaller batches"
            )
        if state.score < _COMPLETE:
            inputs.errors.fill_(torch.inf)
        assert inputs.layer.features is not None
        features = inputs.layer.features(inputs.values)
        pixels = inputs if inputs.layer.pixels else None
        return reconstruction(state.observation, inputs, pixels, features, state.iteration)
