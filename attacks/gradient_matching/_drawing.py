"""Images drawn from what Adam optimizes: pixels, or the weights of an untrained U-Net.

A pyramid adds coarser images to the pixels, so that a descent moves regions, too. Over pixels alone
what they have in common, a region's brightness or color, is the sum of many small and noisy steps.

An untrained U-Net is a prior: what its weights can draw is what counts as an image (Ulyanov et al.,
Deep Image Prior, CVPR 2018). Liu et al., Data Reconstruction Attacks and Defenses, Appendix D:
PixelCNN++ (Salimans et al., 2017) without its masks, group norm for weight norm, two residual
blocks at each resolution, self-attention between them at 16x16, and recovered features added into
every residual block through a linear projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim import rng as streams
from fedsim.models.base import normalize
from fedsim.types import Observation
from fedsim_attacks.gradient_matching._image_priors import valid_range


@final
class Adam:
    """Adam over tensors that it changes in place: the kernel of `torch.optim.Adam(fused=True)`."""

    def __init__(
        self, variables: Sequence[Tensor], betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        # One of torch.optim imports torch's compiler, which takes each process seconds.
        self.variables, self._betas = list(variables), betas
        self._means = [torch.zeros_like(each) for each in variables]
        self._squares = [torch.zeros_like(each) for each in variables]
        self._counts = [torch.zeros((), device=each.device) for each in variables]

    @torch.no_grad()
    def step(self, slopes: Sequence[Tensor], step_size: float) -> None:
        """Moves the variables against `slopes`, one gradient each; `step_size` is Adam's rate."""
        # The kernel walks through memory, and takes the slopes to lie there as the variables do.
        laid_out = [
            slope if slope.stride() == each.stride() else torch.empty_like(each).copy_(slope)
            for each, slope in zip(self.variables, slopes, strict=True)
        ]
        torch._foreach_add_(self._counts, 1)
        torch._fused_adam_(
            self.variables,
            laid_out,
            self._means,
            self._squares,
            [],
            self._counts,
            lr=step_size,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def descend(self, drawn: Tensor, slope: Tensor, step_size: float) -> None:
        """Moves the variables that `drawn` is made of against `slope`, the gradient in it."""
        self.step(torch.autograd.grad(drawn, self.variables, slope), step_size)


_COARSEST = 4  # least side of a coarse image; below there is only the mean


@final
class Pyramid:
    """Adam over images and over coarser ones that are added to them."""

    def __init__(self, images: Tensor) -> None:
        """Descends from `images` (N, C, H, W), which it changes in place."""
        self.images = images
        # Halves while both sides are at least 4, and one pixel an image; all start at 0.
        height, width = images.shape[2] // 2, images.shape[3] // 2
        sizes = []
        while min(height, width) >= _COARSEST:
            sizes.append((height, width))
            height, width = height // 2, width // 2
        self._coarse = [images.new_zeros(*images.shape[:2], *size) for size in [*sizes, (1, 1)]]
        self._optimizer = Adam([images, *self._coarse], betas=(0.9, 0.99))

    def step(self, slope: Tensor, step_size: float) -> None:
        """Takes a step at every resolution against `slope` (N, C, H, W), the images' gradient."""
        before = [level.clone() for level in self._coarse]
        slopes = [slope, *(self._shrink(slope, level) for level in self._coarse)]
        self._optimizer.step(slopes, step_size)
        for level, old in zip(self._coarse, before, strict=True):
            # Pixels hold the sum of all levels already: only a level's change is added.
            self.images.add_(self._enlarge(level - old))

    def _enlarge(self, level: Tensor) -> Tensor:
        return F.interpolate(level, self.images.shape[2:], mode="bilinear", align_corners=False)

    def _shrink(self, slope: Tensor, level: Tensor) -> Tensor:
        """Computes the gradient in one level, by the transpose of `_enlarge`."""
        # Enlarging is linear: its backward kernel, which autograd would call, is its transpose.
        shrunk: Tensor = torch.ops.aten.upsample_bilinear2d_backward(
            slope, self.images.shape[2:], level.shape, align_corners=False
        )
        return shrunk


_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the iterations after which a stepped rate is divided by 10."""


def half_cosine(done: float, final: float = 0.0) -> float:
    """Computes a factor that falls from 1 to `final` along a cosine, as `done` goes from 0 to 1."""
    # Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, without restarts.
    return final + (1 - final) * (0.5 + 0.5 * math.cos(math.pi * done))


def decayed_step(step_size: float, done: int, iterations: int) -> float:
    """Divides `step_size` by 10 as `done` passes 3/8, 5/8 and 7/8 of all `iterations` each."""
    for share in _DECAY_AT:
        if done >= int(iterations * share):
            step_size *= 0.1
    return step_size


_GROUPS = 8  # groups of channels of the U-Net's group norms
_ATTENTION = 16  # side of the resolution that has self-attention
_SMALLEST = 4  # least side of a resolution
_NOISE = 0.1  # standard deviation of the U-Net's fixed input


class _UNet(nn.Module):
    """Draws N images (C, H, W) from a fixed random input, and from features if there are any."""

    start: Tensor

    def __init__(self, count: int, shape: tuple[int, ...], features: int, width: int) -> None:
        """Draws weights and input from torch's global stream.

        `shape` is (C, H, W), `features` an image's number of them or 0, `width` a multiple of 8.
        """
        super().__init__()
        channels, height, columns = shape
        levels = resolutions(height, columns)
        widths = [width] + [2 * width] * (levels - 1)
        sizes = [max(height, columns) >> level for level in range(levels)]
        # A buffer: it moves with the weights and is never trained.
        self.register_buffer("start", _NOISE * torch.randn(count, width, height, columns))
        self.down = nn.ModuleList(
            _Level(w, features, s) for w, s in zip(widths, sizes, strict=True)
        )
        self.shrink = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.up = nn.ModuleList(
            _Level(w, features, s) for w, s in zip(widths[:-1], sizes[:-1], strict=True)
        )
        self.merge = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in pairwise(widths))
        self.out = nn.Sequential(
            nn.GroupNorm(_GROUPS, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1)
        )

    def forward(self, features: Tensor | None) -> Tensor:
        """Draws images (N, C, H, W) with entries in (0, 1), given `features` (N, d) or None."""
        x, skips = self.start, []
        for level, blocks in enumerate(self.down):
            x = blocks(x, features)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        for level in reversed(range(len(self.up))):
            x = F.interpolate(x, size=skips[level].shape[2:])
            # Details that shrinking lost come from the same level on the way down.
            x = self.up[level](self.merge[level](torch.cat([skips[level], x], 1)), features)
        drawn: Tensor = self.out(x)
        # In (0, 1) by construction: a clamp would have no slope beyond the ends.
        return drawn.sigmoid()


def resolutions(height: int, width: int) -> int:
    """Counts resolutions: each halves the one before, while both sides are even and stay >= 4."""
    levels = 1
    while not (height | width) % (1 << levels) and min(height, width) >> levels >= _SMALLEST:
        levels += 1
    return levels


class _Level(nn.Module):
    """Two residual blocks; at 16x16, self-attention between them."""

    def __init__(self, width: int, features: int, size: int) -> None:
        super().__init__()
        self.first = _ResidualBlock(width, features)
        self.attention = _PixelAttention(width) if size == _ATTENTION else nn.Identity()
        self.second = _ResidualBlock(width, features)

    def forward(self, x: Tensor, features: Tensor | None) -> Tensor:
        y: Tensor = self.second(self.attention(self.first(x, features)), features)
        return y


class _ResidualBlock(nn.Module):
    """x plus two convolutions, each after group norm and SiLU, with features added between."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.project = nn.Linear(features, width) if features else None

    def forward(self, x: Tensor, features: Tensor | None) -> Tensor:
        y = self.convolutions[0](F.silu(self.norms[0](x)))
        if self.project is not None and features is not None:
            y = y + self.project(features)[:, :, None, None]
        y = self.convolutions[1](F.silu(self.norms[1](y)))
        added: Tensor = x + y
        return added


class _PixelAttention(nn.Module):
    """x plus self-attention of one head over its positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width)
        self.into = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.into(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, 2)
        y = F.scaled_dot_product_attention(queries, keys, values)
        added: Tensor = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return added


Canvas = Literal["unet", "pixel", "pyramid"]
"""Variables that are optimized: the weights of an untrained U-Net, the pixels themselves, or pixels
and coarser images that are added to them."""
Decay = Literal["steps", "cosine"]
"""Fall of step sizes: divided by 10 at 3/8, 5/8 and 7/8 of the iterations, or as a cosine."""

_RATES = {"pixel": 0.1, "pyramid": 0.1, "unet": 1e-3}  # Adam's step size by default
_PYRAMID_START = 0.3  # standard deviation of the pixels that a pyramid starts at; others start at 1
_FINAL = 0.005  # step size at the end of a cosine, over that of the beginning
_COPYING = 100  # steps in which a U-Net learns to draw given images


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """Variables that are optimized, and the steps that Adam takes in them."""

    canvas: Canvas
    iterations: int  # number of steps over which the step size falls
    width: int = 0  # channels of the U-Net at full resolution; unused by other canvases
    rate: float | None = None  # step size of Adam; None is 0.001 for the U-Net and 0.1 for pixels
    decay: Decay = "steps"


@final
class Drawing:
    """Draws normalized images, and descends in what they are drawn from."""

    def __init__(
        self,
        settings: DrawingSettings,
        observation: Observation,
        rng: torch.Generator,
        *,
        features: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """Draws N images of the shape that the observed model takes, where its parameters lie.

        Args:
            settings: What is optimized, and by which steps.
            observation: The update of N images, of which nothing else is read.
            rng: Source of the pixels to start at, on the CPU.
            features: Features (N, d) that a U-Net is told; None for none.
            seed: Seed of a U-Net's weights.
        """
        count, spec = observation.num_images, observation.model
        device = observation.device
        self._spec, self._features = spec, features
        self.box = valid_range(spec, torch.zeros((), device=device))
        """Normalized images (C, 1, 1) of the pixels 0 and 1."""
        self._network: _UNet | None = None
        if settings.canvas == "unet":
            told = 0 if features is None else features.shape[1]
            # Layers draw their weights from torch's global stream, which is put back afterwards.
            with streams.global_stream(seed):
                self._network = _UNet(count, spec.input_shape, told, settings.width).to(device)
            self._adam = Adam(list(self._network.parameters()))
        else:
            self._pixels = torch.randn(count, *spec.input_shape, generator=rng).to(device)
            if settings.canvas == "pyramid":
                self._pyramid = Pyramid(self._pixels.mul_(_PYRAMID_START))
            else:
                self._adam = Adam([self._pixels])
        self._rate = _RATES[settings.canvas] if settings.rate is None else settings.rate
        self._settings, self._done = settings, 0

    def draw(self) -> Tensor:
        """Draws normalized images (N, C, H, W), differentiable in the weights of a U-Net."""
        if self._network is None:
            return self._pixels
        with torch.enable_grad():
            return normalize(self._network(self._features), self._spec)

    def copy(self, images: Tensor) -> None:
        """Trains the U-Net for 100 steps to draw normalized `images` (N, C, H, W)."""
        adam = Adam(self._adam.variables)
        for _ in range(_COPYING):
            drawn = self.draw()
            # The slope of |drawn - images|² / 2 in what is drawn.
            adam.descend(drawn, drawn.detach() - images, _RATES["unet"])

    def step(self, drawn: Tensor, slope: Tensor) -> None:
        """Takes a step against `slope`, the gradient in the images `drawn`; pixels stay valid."""
        done = self._done / self._settings.iterations
        self._done += 1
        if self._settings.decay == "cosine":
            rate = self._rate * half_cosine(done, _FINAL)
        else:
            rate = self._rate * 0.1 ** sum(done >= at for at in _DECAY_AT)
        if self._network is not None:
            self._adam.descend(drawn, slope, rate)
            return
        if self._settings.canvas == "pyramid":
            self._pyramid.step(slope, rate)
        else:
            self._adam.step([slope], rate)
        self._pixels.clamp_(*self.box)
