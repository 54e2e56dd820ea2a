"""The LeNet of Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019 (their section 4)."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import nn

from fedsim.models.base import Activation, Classifier, ModelPlugin, activation, require_size
from fedsim.models.head import assemble

_CHANNELS = 12
_KERNEL = 5


@final
class LeNet(ModelPlugin):
    """Stacks three 5x5 convolutions of 12 channels, strides 2, 2 and 1, and a linear layer.

    The smooth activation and the wide initialization are what makes gradient matching easy on it.
    """

    paper: ClassVar[str] = (
        "Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019, and their published code"
    )

    activation: Activation = "sigmoid"
    init_scale: Annotated[float, Field(gt=0)] | None = 0.5
    """Weights and biases are drawn from U(-init_scale, init_scale); None: PyTorch's own
    initialization. A two-layer head always keeps its own."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network of (C, H, W): 12 ⌈H/4⌉⌈W/4⌉ features; FedsimError below 8x8."""
        require_size("lenet", input_shape, 8)
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for stride in (2, 2, 1):
            layers.append(
                nn.Conv2d(channels, _CHANNELS, _KERNEL, padding=_KERNEL // 2, stride=stride)
            )
            layers.append(activation(self.activation))
            channels = _CHANNELS
        body = nn.Sequential(*layers)
        self._initialize(body)
        model = assemble(body, self.head, input_shape, num_classes)
        # A uniform draw would destroy the planted neurons of a two-layer head.
        if self.head is None:
            self._initialize(model.head)
        return model

    @torch.no_grad()
    def _initialize(self, module: nn.Module) -> None:
        if self.init_scale is not None:
            for parameter in module.parameters():
                parameter.uniform_(-self.init_scale, self.init_scale)
