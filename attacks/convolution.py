"""The three products of a convolution, each by the kernel that is fastest for its shape.

The usual kernels first bring the weights into a blocked order. Where a large kernel meets few
output positions, as in the last stage of a ResNet on small images, that takes most of the time,
and on a CPU a matrix product over the (channels last) weights as they lie in memory is several
times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHTS_PER_POSITION = 8192
"""Weights per output position (over the batch) from which the matrix product is faster, measured on
kernels of 3x3x128x128 to 3x3x512x512 at 4 to 400 positions."""


class Geometry(NamedTuple):
    """How the kernel moves over the (zero-padded) image."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(module: nn.Conv2d) -> Geometry | None:
        """That of `module`; None if its padding is not by a number of zeros."""
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        return Geometry(module.stride, module.padding, module.dilation, module.groups)

    def positions(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """(H', W') from images of `size` (H, W)."""
        return [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def live_window(
        self, size: Sequence[int], kernel: Sequence[int]
    ) -> tuple[Geometry, slice, slice] | None:
        """The rows and columns of a kernel that ever meet an image of `size`, and their geometry.

        None if all do, or if no even padding moves the rest as the whole moved.
        """
        windows, padding = [], []
        for count, n, k, s, p, d in zip(
            self.positions(size, kernel),
            size,
            kernel,
            self.stride,
            self.padding,
            self.dilation,
            strict=True,
        ):
            live = [i for i in range(k) if any(0 <= o * s + i * d - p < n for o in range(count))]
            if not live:
                return None
            windows.append(slice(live[0], live[-1] + 1))
            padding.append(p - live[0] * d)
        rest = [w.stop - w.start for w in windows]
        less = self._replace(padding=tuple(padding))
        same = less.positions(size, rest) == self.positions(size, kernel)
        if rest == list(kernel) or min(padding) < 0 or not same:
            return None
        return less, windows[0], windows[1]


def output(x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry) -> Tensor:
    """(N, O, H', W') from images (N, C, H, W), weights (O, C / groups, k, l) and bias (O,)."""
    if not _is_small(x, w, geometry):
        return F.conv2d(x, w, b, *geometry)
    patches = _patches(x, w, geometry)
    rows = patches.flatten(0, 2).flatten(1)
    y = rows @ _matrix(w).t() if b is None else torch.addmm(b, rows, _matrix(w).t())
    return y.view(*patches.shape[:3], -1).permute(0, 3, 1, 2)


def input_gradient(gy: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """<gy, output(x, w)> differentiated in x; of x only the shape and the device count."""
    if not _is_small(x, w, geometry):
        return _backward(gy, x, w, geometry, [True, False, False])[0]
    (s0, s1), (p0, p1), (d0, d1), _ = geometry
    n, _, h, v = gy.shape
    _, c, height, width = x.shape
    taps = (_rows(gy) @ _matrix(w)).view(n, h, v, *w.shape[2:], c)
    padded = gy.new_zeros(n, height + 2 * p0, width + 2 * p1, c)
    for i in range(w.shape[2]):
        rows = slice(i * d0, i * d0 + s0 * (h - 1) + 1, s0)
        for j in range(w.shape[3]):
            columns = slice(j * d1, j * d1 + s1 * (v - 1) + 1, s1)
            padded[:, rows, columns] += taps[:, :, :, i, j]
    return padded[:, p0 : p0 + height, p1 : p1 + width].permute(0, 3, 1, 2)


def weight_gradient(gy: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """<gy, output(x, w)> differentiated in w; of w only the shape counts."""
    if not _is_small(x, w, geometry):
        return _backward(gy, x, w, geometry, [False, True, False])[1]
    patches = _patches(x, w, geometry)
    product = _rows(gy).t() @ patches.flatten(0, 2).flatten(1)
    return product.view(-1, *patches.shape[3:]).permute(0, 3, 1, 2)


def _is_small(x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    if x.device.type != "cpu" or geometry.groups != 1:
        return False
    h, v = geometry.positions(x.shape[2:], w.shape[2:])
    return x.shape[0] * h * v * _WEIGHTS_PER_POSITION <= w.numel()


def _patches(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """(N, H', W', k, l, C), contiguous: what the kernel sees at each output position."""
    (s0, s1), (p0, p1), (d0, d1), _ = geometry
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, p1, p1, p0, p0)).contiguous()
    n, rows, columns = padded.stride()[:3]
    positions = geometry.positions(x.shape[2:], w.shape[2:])
    shape = (len(x), *positions, *w.shape[2:], x.shape[1])
    strides = (n, s0 * rows, s1 * columns, d0 * rows, d1 * columns, 1)
    return padded.as_strided(shape, strides).contiguous()


def _rows(y: Tensor) -> Tensor:
    """(N, O, H', W') -> (N H' W', O)."""
    return y.permute(0, 2, 3, 1).flatten(0, 2)


def _matrix(w: Tensor) -> Tensor:
    """(O, C, k, l) -> (O, k l C); without a copy if `w` is channels last."""
    return w.permute(0, 2, 3, 1).flatten(1)


def _backward(
    gy: Tensor, x: Tensor, w: Tensor, geometry: Geometry, wants: list[bool]
) -> tuple[Tensor, ...]:
    stride, padding, dilation, groups = geometry
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        gy, x, w, None, stride, padding, dilation, False, [0, 0], groups, wants
    )
    return gradients
