"""ResNet-18 of He et al., Deep Residual Learning for Image Recognition, CVPR 2016."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field
from torch import nn

from fedsim.models.base import Classifier, ModelPlugin, norm, require_size
from fedsim.models.head import assemble

_MIN_SIDE = {"small": 5, "imagenet": 17}


@final
class ResNet18(ModelPlugin):
    """Stacks torchvision's basic blocks as ResNet-18; 8 width features after average pooling.

    With the `imagenet` stem the last feature map of a 32x32 image is a single pixel; attack papers
    on small images use the `small` stem, at about 15 times the arithmetic.
    """

    paper: ClassVar[str] = (
        "He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016"
    )

    stem: Literal["small", "imagenet"] = "small"
    """`small`: 3x3 convolution of stride 1; `imagenet`: 7x7 of stride 2 and a max pool."""
    norm: Literal["batch", "group"] = "batch"
    width: Annotated[int, Field(gt=0, le=1024)] = 64
    """Channels of the first stage, doubled in each of the other three."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Builds the network; a FedsimError below 5x5 (`small`) or 17x17 pixels (`imagenet`)."""
        require_size(f"resnet18 with the {self.stem} stem", input_shape, _MIN_SIDE[self.stem])
        body = self._body(input_shape[0])
        # torchvision's initialization; its norm layers start at weight 1 and bias 0 by default.
        for module in body.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return assemble(body, self.head, input_shape, num_classes)

    def _body(self, channels: int) -> nn.Sequential:
        # Layer names are torchvision's, so that its checkpoints fit.
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if self.stem == "small":
            layers["conv1"] = nn.Conv2d(channels, self.width, 3, stride=1, padding=1, bias=False)
        else:
            layers["conv1"] = nn.Conv2d(channels, self.width, 7, stride=2, padding=3, bias=False)
        layers["bn1"] = norm(self.norm, self.width)
        layers["relu"] = nn.ReLU()
        if self.stem == "imagenet":
            layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = self.width
        for stage in range(4):
            outputs = self.width << stage
            layers[f"layer{stage + 1}"] = self._stage(inputs, outputs, 2 if stage else 1)
            inputs = outputs
        layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(layers)

    def _stage(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        from torchvision.models.resnet import BasicBlock, conv1x1

        norm_layer = partial(norm, self.norm)
        downsample = None
        if stride != 1:
            downsample = nn.Sequential(conv1x1(inputs, outputs, stride), norm_layer(outputs))
        return nn.Sequential(
            BasicBlock(inputs, outputs, stride, downsample, norm_layer=norm_layer),
            BasicBlock(outputs, outputs, norm_layer=norm_layer),
        )
