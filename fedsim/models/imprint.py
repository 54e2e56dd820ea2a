"""The imprint module: two linear layers in front of a model that write images into its gradient.

Fowl, Geiping, Czaja, Goldblum and Goldstein, Robbing the Fed: Directly Obtaining Private Data in
Federated Learning with Modified Models, ICLR 2022, section 3.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

_BELOW_ALL = -10.0
"""Lower end of the first bin, in standard deviations: a quantile of 0 would be infinite."""


class ImprintConfig(BaseModel):
    """Describes an `Imprint` module in front of a model: a malicious server's modification."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bins: Annotated[int, Field(ge=2, le=4096)] = 128
    """Number of neurons. An image that is alone in its bin of brightness can be read off the
    gradient."""
    std: Annotated[float, Field(gt=0, le=1e6)] = 0.6
    """Standard deviation over images of the brightness of a normalized image (the mean of all its
    entries), which the bins take to be N(0, std²): 0.5 to 0.7 for photographs."""
    gain: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the fixed noise pattern that is added to an image in proportion to its brightness.
    The gradient that carries the images grows with it, and so does the disturbance of the model."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the first layer, divided out of the second. The model stays the same, but that
    gradient is divided by it: with a small one it stands out of noise, but local steps and training
    soon move the bins out of place."""


class Imprint(nn.Module):
    """Computes x + V relu(W x + b) of normalized images x (C, H, W), as vectors of d = CHW entries.

    `config` has k (`bins`), std, gain and s (`scale`). Each of the k rows of W is s h, where h =
    (1/d, ..., 1/d) takes the mean. b_i is -s c_i, where c_i is the quantile i/k of N(0, std²) and
    c_0 is -10 std. Image x passes the neurons with c_i < h'x. All columns of V are (gain/sk) v, for
    one v drawn from N(0, I) by torch's global stream. So x enters the gradient of each row that it
    passes with the same factor g. The difference of two rows' gradients is Σ g x over the images in
    the bin between them. In the paper (Fowl et al., Robbing the Fed, ICLR 2022, section 3) V is all
    ones, s is 1, and x is not added: with it the model goes on working.
    """

    def __init__(self, config: ImprintConfig, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = input_shape
        size = channels * height * width
        self.hidden = nn.Linear(size, config.bins)
        """W (k, d) and b (k,)."""
        self.activation = nn.ReLU()
        self.output = nn.Linear(config.bins, size, bias=False)
        """V (d, k)."""
        self.config = config
        self.plant()

    def forward(self, images: Tensor) -> Tensor:
        """Adds V relu(W x + b) to normalized images x: (B, C, H, W) -> (B, C, H, W)."""
        written: Tensor = self.output(self.activation(self.hidden(images.flatten(1))))
        return images + written.view_as(images)

    @torch.no_grad()
    def plant(self) -> None:
        """Sets W, b and V anew in place; v is drawn from torch's global stream."""
        config, size = self.config, self.hidden.in_features
        self.hidden.weight.fill_(config.scale / size)
        brightness = NormalDist(sigma=config.std)
        # Quantiles make bins equally likely: most images are alone if bins outnumber them.
        quantiles = [brightness.inv_cdf(i / config.bins) for i in range(1, config.bins)]
        thresholds = torch.tensor([_BELOW_ALL * config.std, *quantiles])
        self.hidden.bias.copy_(-config.scale * thresholds)
        pattern = torch.randn(size, 1) * (config.gain / (config.bins * config.scale))
        # All columns are equal: an image enters every row that it passes with the same factor g.
        self.output.weight.copy_(pattern.expand_as(self.output.weight))

    @torch.no_grad()
    def unplant(self) -> None:
        """Sets V to zero in place: images pass unchanged, and W's gradient shows none of them."""
        self.output.weight.zero_()
