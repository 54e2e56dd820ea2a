"""The ConvNet family of Geiping et al., Inverting Gradients, NeurIPS 2020."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field
from torch import nn

from fedsim.models.base import (
    Activation,
    Classifier,
    ModelPlugin,
    Norm,
    activation,
    norm,
    require_size,
)
from fedsim.models.head import assemble

_POOL = 3
# Channels of each 3x3 convolution in units of `width`, block by block; each block ends in a pool.
_BLOCKS: Mapping[int, tuple[tuple[int, ...], ...]] = {
    4: ((1, 2), (4, 4)),
    8: ((1, 2, 2, 4, 4, 4), (4, 4)),
}


@final
class ConvNet(ModelPlugin):
    """Stacks two blocks of 3x3 convolutions, each with a 3x3 max pool, and a linear layer.

    `depth: 8, width: 64, norm: batch` is the paper's ConvNet64. The default is half as deep and
    half as wide: a fortieth of its arithmetic on 32x32 images, and the same number of features
    per unit of width (36 width). Group norm is the default because it works at any batch size and
    in either mode, and leaves no batch statistics to leak.
    """

    paper: ClassVar[str] = (
        "Geiping, Bauermeister, Dröge and Moeller, Inverting Gradients, NeurIPS 2020, and their "
        "published code"
    )

    depth: Literal[4, 8] = 4
    """Number of convolutions."""
    width: Annotated[int, Field(gt=0, le=4096)] = 32
    """Channels of the first convolution; the last ones have four times as many."""
    norm: Norm = "group"
    """Normalization between each convolution and its activation."""
    activation: Activation = "relu"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network of (C, H, W): 4 width ⌊H/9⌋⌊W/9⌋ features; FedsimError below 9x9."""
        blocks = _BLOCKS[self.depth]
        require_size("convnet", input_shape, _POOL ** len(blocks))
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for block in blocks:
            for multiple in block:
                layers += [
                    nn.Conv2d(channels, multiple * self.width, kernel_size=3, padding=1),
                    norm(self.norm, multiple * self.width),
                    activation(self.activation),
                ]
                channels = multiple * self.width
            layers.append(nn.MaxPool2d(_POOL))
        return assemble(nn.Sequential(*layers), self.head, input_shape, num_classes)
