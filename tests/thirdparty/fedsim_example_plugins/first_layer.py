"""Phong, Aono, Hayashi, Wang and Moriai, Privacy-Preserving Deep Learning via Additively
Homomorphic Encryption, IEEE TIFS 2018, section 3: a first layer that is fully connected and has a
bias gives its input away, since dL/dW_i = (dL/db_i) x for every neuron i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import denormalize
from fedsim.types import ModelSpec, Observation, Reconstruction, Tensors


@dataclass(kw_only=True)
class FirstLayerState(AttackState):
    """The quotient, as the model's input."""

    image: Tensor
    model: ModelSpec


@final
class FirstLayer(Attack[FirstLayerState]):
    """Divides the first layer's weight gradient by its bias gradient: exact for one image."""

    paper: ClassVar[str] = "Phong et al., IEEE TIFS 2018, section 3"

    neurons: Annotated[int, Field(ge=1, le=4096)] = 1
    """How many neurons, those with the largest bias gradients, are averaged."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> FirstLayerState:
        if observation.num_images != 1:
            raise AttackFailed(f"only one image can be divided out, not {observation.num_images}")
        weight, bias = _first_layer(observation.update, observation.model)
        chosen = bias.abs().topk(min(self.neurons, len(bias))).indices
        image = (weight[chosen] / bias[chosen, None]).mean(0)
        misfit = torch.linalg.vector_norm(weight - bias[:, None] * image)
        return FirstLayerState(
            loss=misfit / torch.linalg.vector_norm(weight),
            image=image.view(1, *observation.model.input_shape),
            model=observation.model,
        )

    def step(self, state: FirstLayerState) -> FirstLayerState:
        state.iteration += 1
        return state

    def terminate(self, state: FirstLayerState) -> bool:
        return True

    def postprocess(self, state: FirstLayerState) -> Reconstruction:
        return Reconstruction(
            images=denormalize(state.image, state.model).clamp(0, 1),
            loss=float(state.loss),
            iterations=state.iteration,
        )


def _first_layer(update: Tensors, model: ModelSpec) -> tuple[Tensor, Tensor]:
    channels, height, width = model.input_shape
    for name, weight in update.items():
        bias = update.get(name.removesuffix("weight") + "bias")
        if weight.dim() == 2 and weight.shape[1] == channels * height * width and bias is not None:
            return weight, bias
    raise AttackFailed("the model does not begin with a fully connected layer that has a bias")
