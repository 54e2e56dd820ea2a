"""An untrained U-Net as a prior of images: what its weights can draw is what counts as an image.

Liu et al., Data Reconstruction Attacks and Defenses, Appendix D: residual blocks and skip
connections of PixelCNN++ (Salimans et al., 2017) without its masks, group norm for weight norm, two
residual blocks at each resolution, self-attention between them at 16x16, and recovered features
added into every residual block through a linear projection. Ulyanov et al., Deep Image Prior, CVPR
2018.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = 8
_ATTENTION = 16
_SMALLEST = 4
_NOISE = 0.1


class UNet(nn.Module):
    """From a fixed input of its own, and features if there are any, to N images of (C, H, W).

    Resolutions are halved from (H, W) for as long as both are even and stay at 4 or more: 32, 16,
    8, 4 for images of 32x32. The first has `width` channels, the others twice as many.
    """

    start: Tensor

    def __init__(self, count: int, shape: tuple[int, int, int], features: int, width: int) -> None:
        """Draws weights and input from torch's global stream."""
        super().__init__()
        channels, height, columns = shape
        levels = resolutions(height, columns)
        widths = [width] + [2 * width] * (levels - 1)
        sizes = [max(height, columns) >> level for level in range(levels)]
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
        """Draws (N, C, H, W), each entry in (0, 1); `features` (N, d), as long as they are many."""
        x, skips = self.start, []
        for level, blocks in enumerate(self.down):
            x = blocks(x, features)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        for level in reversed(range(len(self.up))):
            x = F.interpolate(x, size=skips[level].shape[2:])
            x = self.up[level](self.merge[level](torch.cat([skips[level], x], 1)), features)
        drawn: Tensor = self.out(x)
        return drawn.sigmoid()


def resolutions(height: int, width: int) -> int:
    """Counts the resolutions: each halves the one before, while both sizes are even and >= 4."""
    levels = 1
    while _halves(height, levels) and _halves(width, levels):
        levels += 1
    return levels


def _halves(size: int, levels: int) -> bool:
    return size % (1 << levels) == 0 and size >> levels >= _SMALLEST


class _Level(nn.Module):
    """Two residual blocks; at 16x16, self-attention between them."""

    def __init__(self, width: int, features: int, size: int) -> None:
        super().__init__()
        self.first = _Block(width, features)
        self.attention = _Attention(width) if size == _ATTENTION else nn.Identity()
        self.second = _Block(width, features)

    def forward(self, x: Tensor, features: Tensor | None) -> Tensor:
        y: Tensor = self.second(self.attention(self.first(x, features)), features)
        return y


class _Block(nn.Module):
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


class _Attention(nn.Module):
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
