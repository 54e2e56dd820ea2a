"""The three products of a convolution, each by the algorithm that is fastest for its shape.

An algorithm brings images, weights and output gradients into a form of its own once, and takes each
product of those forms: a gradient-matching iteration uses every one of them in two or three of its
seven products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHTS_PER_POSITION = 8192
"""Weights per output position (over the batch) from which `Patches` are faster on a CPU, measured
on kernels of 3x3x128x128 to 3x3x512x512 at 4 to 400 positions."""


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


class Problem(NamedTuple):
    """Shapes of one convolution."""

    images: torch.Size
    """(N, C, H, W)."""
    weights: torch.Size
    """(O, C / groups, k, l)."""
    geometry: Geometry

    @property
    def outputs(self) -> tuple[int, int]:
        """(H', W')."""
        height, width = self.geometry.positions(self.images[2:], self.weights[2:])
        return height, width


class Algorithm(ABC):
    """The products of images (N, C, H, W), weights (O, C, k, l), output gradients (N, O, H', W').

    They are those of PyTorch up to rounding. What `images`, `weights` and `gradients` return is for
    the products of the same algorithm only.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abstractmethod
    def images(self, x: Tensor) -> Tensor:
        """Images in this algorithm's form."""

    @abstractmethod
    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """Weights in this algorithm's form; the next call may overwrite them if not to `keep`."""

    @abstractmethod
    def gradients(self, gy: Tensor) -> Tensor:
        """Output gradients in this algorithm's form."""

    @abstractmethod
    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """(N, O, H', W'), in fresh memory."""

    @abstractmethod
    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """<gy, output> differentiated in the images, whose values do not count: (N, C, H, W)."""

    @abstractmethod
    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """<gy, output> differentiated in the weights, whose values do not count: (O, C, k, l)."""


@final
class Direct(Algorithm):
    """PyTorch's own kernels."""

    def images(self, x: Tensor) -> Tensor:
        return x

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        return w

    def gradients(self, gy: Tensor) -> Tensor:
        return gy

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.conv2d."""
        return F.conv2d(images, weights, bias, *self.problem.geometry)

    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """aten::convolution_backward."""
        return self._backward(gradients, images, weights, [True, False, False])[0]

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """aten::convolution_backward."""
        return self._backward(gradients, images, weights, [False, True, False])[1]

    def _backward(self, gy: Tensor, x: Tensor, w: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
        stride, padding, dilation, groups = self.problem.geometry
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gy, x, w, None, stride, padding, dilation, False, [0, 0], groups, wants
        )
        return gradients


@final
class Patches(Algorithm):
    """A matrix product over what the kernel sees at each output position.

    The usual kernels first bring the weights into a blocked order. Where a large kernel meets few
    positions, as in the last stage of a ResNet on small images, that takes most of their time; here
    channels-last weights are used as they lie in memory.
    """

    @staticmethod
    def pays(problem: Problem) -> bool:
        """Where weights are many and positions few; not for grouped convolutions."""
        h, v = problem.outputs
        many = problem.images[0] * h * v * _WEIGHTS_PER_POSITION
        return problem.geometry.groups == 1 and many <= problem.weights.numel()

    def images(self, x: Tensor) -> Tensor:
        """(N H' W', k l C)."""
        (s0, s1), (p0, p1), (d0, d1), _ = self.problem.geometry
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, p1, p1, p0, p0)).contiguous()
        n, rows, columns = padded.stride()[:3]
        shape = (len(x), *self.problem.outputs, *self.problem.weights[2:], x.shape[1])
        strides = (n, s0 * rows, s1 * columns, d0 * rows, d1 * columns, 1)
        return padded.as_strided(shape, strides).reshape(
            len(x) * math.prod(self.problem.outputs), -1
        )

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """(O, k l C); without a copy if they are channels last."""
        return w.permute(0, 2, 3, 1).flatten(1)

    def gradients(self, gy: Tensor) -> Tensor:
        """(N H' W', O)."""
        return gy.permute(0, 2, 3, 1).flatten(0, 2)

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        y = images @ weights.t() if bias is None else torch.addmm(bias, images, weights.t())
        return y.view(self.problem.images[0], *self.problem.outputs, -1).permute(0, 3, 1, 2)

    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """Gradients times weights, each tap added where it came from."""
        (s0, s1), (p0, p1), (d0, d1), _ = self.problem.geometry
        n, c, height, width = self.problem.images
        h, v = self.problem.outputs
        taps = (gradients @ weights).view(n, h, v, *self.problem.weights[2:], c)
        padded = taps.new_zeros(n, height + 2 * p0, width + 2 * p1, c)
        for i in range(taps.shape[3]):
            rows = slice(i * d0, i * d0 + s0 * (h - 1) + 1, s0)
            for j in range(taps.shape[4]):
                columns = slice(j * d1, j * d1 + s1 * (v - 1) + 1, s1)
                padded[:, rows, columns] += taps[:, :, :, i, j]
        return padded[:, p0 : p0 + height, p1 : p1 + width].permute(0, 3, 1, 2)

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        o, c, *kernel = self.problem.weights
        return (gradients.t() @ images).view(o, *kernel, c).permute(0, 3, 1, 2)
