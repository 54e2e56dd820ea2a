"""A fully connected network."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

from pydantic import Field
from torch import nn

from fedsim.models.base import Activation, Classifier, ModelPlugin, activation
from fedsim.models.head import assemble


@final
class MLP(ModelPlugin):
    """Stacks fully connected layers on the flattened input; features are the last hidden layer."""

    takes_rows: ClassVar[bool] = True

    hidden: tuple[Annotated[int, Field(gt=0, le=1 << 20)], ...] = (256, 128)
    """Neurons of each hidden layer. Empty: the features are the image itself, so that the model is
    softmax regression, or with a two-layer head the two-layer network of Wang, Lee and Lei,
    Reconstructing Training Data from Model Gradient, Provably, AISTATS 2023."""
    activation: Activation = "relu"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network of (C, H, W) or (D,): hidden[-1] features, or all entries if empty."""
        layers: list[nn.Module] = [nn.Flatten()]
        size = math.prod(input_shape)
        for neurons in self.hidden:
            layers += [nn.Linear(size, neurons), activation(self.activation)]
            size = neurons
        return assemble(nn.Sequential(*layers), self.head, input_shape, num_classes)
