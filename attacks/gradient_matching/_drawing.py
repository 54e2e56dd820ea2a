"""Images drawn from what Adam optimizes: pixels, or the weights of an untrained U-Net."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from fedsim import rng as streams
from fedsim.models.base import normalize
from fedsim.types import ModelSpec
from fedsim_attacks.gradient_matching._contrast import valid_range
from fedsim_attacks.gradient_matching._pyramid import Pyramid
from fedsim_attacks.gradient_matching._schedules import half_cosine, stepped
from fedsim_attacks.gradient_matching._unet import UNet

Canvas = Literal["unet", "pixel", "pyramid"]
"""What is optimized: the weights of an untrained U-Net, the pixels themselves, or pixels and
coarser images that are added to them."""
Decay = Literal["steps", "cosine"]
"""How step sizes fall: divided by 10 at 3/8, 5/8 and 7/8 of the iterations, or as a cosine."""

_RATES = {"pixel": 0.1, "pyramid": 0.1, "unet": 1e-3}
_PYRAMID_START = 0.3
"""Standard deviation of the pixels that a pyramid starts at; others start at 1."""
_FINAL = 0.005
"""Step size at the end of a cosine, over that of the beginning."""
_COPYING = 100
"""Steps in which a U-Net learns to draw given images."""


@final
class Drawing:
    """Draws normalized images, and descends in what they are drawn from."""

    def __init__(
        self,
        canvas: Canvas,
        count: int,
        spec: ModelSpec,
        *,
        features: Tensor | None,
        width: int,
        rate: float | None,
        iterations: int,
        seed: int,
        rng: torch.Generator,
        device: torch.device,
        decay: Decay = "steps",
    ) -> None:
        """Starts at random pixels, or at a U-Net of random weights.

        Args:
            canvas: what is optimized.
            count: images N.
            spec: of the victim's model, whose images they are.
            features: (N, d) that the U-Net is told; None of none.
            width: channels of the U-Net at full resolution.
            rate: step size of Adam; None is 0.001 for the U-Net and 0.1 for pixels.
            iterations: over which it falls.
            seed: of the U-Net's weights.
            rng: of the pixels.
            device: of the images.
            decay: how it falls.
        """
        self._spec, self._features = spec, features
        self.box = valid_range(spec, torch.zeros((), device=device))
        """Normalized images (C, 1, 1) of the pixels 0 and 1."""
        self._pixels: Tensor | None = None
        self._network: UNet | None = None
        self._pyramid: Pyramid | None = None
        if canvas != "unet":
            start = torch.randn(count, *spec.input_shape, generator=rng).to(device)
            if canvas == "pyramid":
                self._pyramid = Pyramid(start.mul_(_PYRAMID_START), betas=(0.9, 0.99))
            else:
                start.requires_grad_()
            self._pixels = start
            variables = [start]
        else:
            told = 0 if features is None else features.shape[1]
            with streams.global_stream(seed):
                self._network = UNet(count, spec.input_shape, told, width).to(device)
            variables = list(self._network.parameters())
        self._rate = _RATES[canvas] if rate is None else rate
        self._variables = variables
        self._optimizer = self._make_optimizer(self._rate)
        self._decay, self._iterations, self._done = decay, iterations, 0

    def draw(self) -> Tensor:
        """Draws (N, C, H, W), differentiable in what is optimized."""
        if self._network is None:
            assert self._pixels is not None
            return self._pixels
        with torch.enable_grad():
            return normalize(self._network(self._features), self._spec)

    def copy(self, images: Tensor) -> None:
        """Brings a U-Net to draw normalized `images` (N, C, H, W) as nearly as it soon can."""
        optimizer = self._make_optimizer(_RATES["unet"])
        for _ in range(_COPYING):
            drawn = self.draw()
            optimizer.zero_grad()
            torch.autograd.backward(drawn, drawn.detach() - images)
            optimizer.step()

    def _make_optimizer(self, rate: float) -> torch.optim.Adam:
        return torch.optim.Adam(self._variables, lr=rate, fused=True)

    def step(self, drawn: Tensor, slope: Tensor) -> None:
        """Takes a step of Adam, given the gradient in the images `drawn`; pixels stay valid."""
        done = self._done / self._iterations
        fall = half_cosine(done, _FINAL) if self._decay == "cosine" else stepped(done)
        self._done += 1
        if self._pyramid is not None:
            self._pyramid.step(slope, self._rate * fall)
        else:
            self._optimizer.zero_grad()
            if self._pixels is None:
                torch.autograd.backward(drawn, slope)
            else:
                self._pixels.grad = slope
            self._optimizer.param_groups[0]["lr"] = self._rate * fall
            self._optimizer.step()
        if self._pixels is not None:
            self._pixels.data.clamp_(*self.box)
