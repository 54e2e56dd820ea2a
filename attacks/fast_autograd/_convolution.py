"""The three products of a convolution, each by the algorithm that is fastest for its shape."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHTS_PER_POSITION = 8192
"""Weights per output position from which `Patches` are faster on a CPU, measured on kernels of
3x3x128x128 to 3x3x512x512 at 4 to 400 positions."""


class Geometry(NamedTuple):
    """Where a kernel is placed on a zero-padded image, in pairs (down, across) but for `groups`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def read(module: nn.Conv2d) -> Geometry | None:
        """Reads the geometry of `module`; None unless its padding is a number of zeros."""
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        return Geometry(module.stride, module.padding, module.dilation, module.groups)

    def positions(self, size: Sequence[int], kernel: Sequence[int]) -> list[int]:
        """Computes the outputs' size (H', W') for images of `size` (H, W) and a `kernel` (k, l)."""
        return [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def live_window(
        self, size: Sequence[int], kernel: Sequence[int]
    ) -> tuple[Geometry, slice, slice] | None:
        """Finds geometry, rows and columns of the part that meets images; None if all does."""
        # Also none if no padding that is the same on both sides gives the part the same outputs.
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
            # Tap i is live if for some output o it reads a pixel o s + i d - p inside of the image.
            live = [i for i in range(k) if any(0 <= o * s + i * d - p < n for o in range(count))]
            if not live:
                return None
            windows.append(slice(live[0], live[-1] + 1))
            # Without the taps before it the kernel begins later, for which less padding makes up.
            padding.append(p - live[0] * d)
        rest = [w.stop - w.start for w in windows]
        less = self._replace(padding=tuple(padding))
        same = less.positions(size, rest) == self.positions(size, kernel)
        if rest == list(kernel) or min(padding) < 0 or not same:
            return None
        return less, windows[0], windows[1]


class ConvolutionShape(NamedTuple):
    """Shapes of one convolution."""

    images: torch.Size  # (N, C, H, W)
    weights: torch.Size  # (O, C / groups, k, l)
    geometry: Geometry

    @property
    def outputs(self) -> tuple[int, int]:
        height, width = self.geometry.positions(self.images[2:], self.weights[2:])
        return height, width


class ConvolutionAlgorithm:
    """The products of images (N, C, H, W), weights (O, C, k, l), gradients (N, O, H', W').

    Each algorithm has its own forms of these, for the shapes of one convolution, its `problem`.
    This one takes tensors as they are, and PyTorch's own kernels.
    """

    def __init__(self, problem: ConvolutionShape) -> None:
        self.problem = problem

    def images(self, x: Tensor) -> Tensor:
        """Converts images `x` (N, C, H, W) to this algorithm's own layout."""
        return x

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """Converts weights `w` (O, C, k, l); the next call may overwrite them unless `keep`."""
        return w

    def gradients(self, gy: Tensor) -> Tensor:
        """Converts output gradients `gy` (N, O, H', W') to this algorithm's own layout."""
        return gy

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes the convolution (N, O, H', W') of converted tensors, as a new one."""
        return F.conv2d(images, weights, bias, *self.problem.geometry)

    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """Computes the gradient (N, C, H, W) in the images, of which only the shape is used."""
        return self._backward(gradients, images, weights, [True, False, False])[0]

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """Computes the gradient (O, C, k, l) in the weights, of which only the shape is used."""
        return self._backward(gradients, images, weights, [False, True, False])[1]

    def _backward(self, gy: Tensor, x: Tensor, w: Tensor, wants: list[bool]) -> tuple[Tensor, ...]:
        stride, padding, dilation, groups = self.problem.geometry
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gy, x, w, None, stride, padding, dilation, False, [0, 0], groups, wants
        )
        return gradients


@final
class Patches(ConvolutionAlgorithm):
    """A matrix product over what the kernel sees at each output position."""

    # The usual kernels first bring the weights into a blocked order, which takes most of the time
    # where a large kernel meets few positions. Here channels-last weights are used as they lie.

    @staticmethod
    def pays(problem: ConvolutionShape) -> bool:
        """Says whether there are enough weights for few enough positions; False for groups."""
        h, v = problem.outputs
        many = problem.images[0] * h * v * _WEIGHTS_PER_POSITION
        return problem.geometry.groups == 1 and many <= problem.weights.numel()

    def images(self, x: Tensor) -> Tensor:
        """Lists what the kernel sees at each output position: (N H' W', k l C)."""
        (s0, s1), (p0, p1), (d0, d1), _ = self.problem.geometry
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, p1, p1, p0, p0)).contiguous()
        n, rows, columns = padded.stride()[:3]
        shape = (len(x), *self.problem.outputs, *self.problem.weights[2:], x.shape[1])
        strides = (n, s0 * rows, s1 * columns, d0 * rows, d1 * columns, 1)
        # A view of overlapping windows; the one copy is the matrix itself.
        return padded.as_strided(shape, strides).reshape(
            len(x) * math.prod(self.problem.outputs), -1
        )

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """Flattens weights `w` (O, C, k, l) to (O, k l C); a view if they are channels last."""
        return w.permute(0, 2, 3, 1).flatten(1)

    def gradients(self, gy: Tensor) -> Tensor:
        """Flattens output gradients to (N H' W', O)."""
        return gy.permute(0, 2, 3, 1).flatten(0, 2)

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        y = images @ weights.t() if bias is None else torch.addmm(bias, images, weights.t())
        return y.view(self.problem.images[0], *self.problem.outputs, -1).permute(0, 3, 1, 2)

    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        (s0, s1), (p0, p1), (d0, d1), _ = self.problem.geometry
        n, c, height, width = self.problem.images
        h, v = self.problem.outputs
        taps = (gradients @ weights).view(n, h, v, *self.problem.weights[2:], c)
        padded = taps.new_zeros(n, height + 2 * p0, width + 2 * p1, c)
        # A loop over taps and not positions: within one tap no two positions write to one pixel.
        for i in range(taps.shape[3]):
            rows = slice(i * d0, i * d0 + s0 * (h - 1) + 1, s0)
            for j in range(taps.shape[4]):
                columns = slice(j * d1, j * d1 + s1 * (v - 1) + 1, s1)
                padded[:, rows, columns] += taps[:, :, :, i, j]
        return padded[:, p0 : p0 + height, p1 : p1 + width].permute(0, 3, 1, 2)

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        o, c, *kernel = self.problem.weights
        return (gradients.t() @ images).view(o, *kernel, c).permute(0, 3, 1, 2)


_OUT, _KERNEL = 4, 3
_IN = _OUT + _KERNEL - 1
# Points 0, ±1, ±2 and infinity; Aᵀ, G and Bᵀ of F(4x4, 3x3) in Lavin and Gray, Fast Algorithms
# for Convolutional Neural Networks, CVPR 2016.
_AT = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
_G = [
    [1 / 4, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6],
    [1 / 24, 1 / 12, 1 / 6],
    [1 / 24, -1 / 12, 1 / 6],
    [0, 0, 1],
]
_BT = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
_CHANNELS, _TILES = 64, 40
"""Channels, and tiles over the batch, from which Winograd's algorithm is faster on a CPU (measured
at 64 to 512 channels, 1 to 512 tiles)."""


@lru_cache
def _matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (16, 36), (36, 9), (36, 36): what Aᵀ, G and Bᵀ do to both sides of a tile."""
    both = [torch.tensor(m, dtype=torch.float64) for m in (_AT, _G, _BT)]
    # vec(A X A') = (A ⊗ A) vec X: a single product transforms both sides of all tiles.
    a, g, b = (torch.kron(m, m).to(dtype) for m in both)
    return a, g, b


class _Scratch(threading.local):
    """Reusable memory for results that are consumed at once, one piece for each use."""

    # MKL's batched product of 9 MB takes 17 ms into fresh pages, 1 ms into used ones.

    def __init__(self) -> None:
        self._pieces: dict[str, Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory, valid until the next `take` for the same `use`."""
        size = math.prod(shape) * dtype.itemsize
        piece = self._pieces.get(use)
        if piece is None or len(piece) < size:
            piece = self._pieces[use] = torch.empty(size, dtype=torch.uint8)
        return piece[:size].view(dtype).view(shape)


_scratch = _Scratch()


def _product(a: Tensor, b: Tensor) -> Tensor:
    out = _scratch.take("product", (len(a), a.shape[1], b.shape[2]), a.dtype)
    return torch.bmm(a, b, out=out)


@final
class Winograd(ConvolutionAlgorithm):
    """Convolutions of 3x3 kernels with stride 1 by Winograd's F(4x4, 3x3), in T tiles."""

    def __init__(self, problem: ConvolutionShape) -> None:
        super().__init__(problem)
        height, width = problem.outputs
        self._tiles = -(-height // _OUT), -(-width // _OUT)

    @staticmethod
    def applies(problem: ConvolutionShape) -> bool:
        (stride, _, dilation, groups), kernel = problem.geometry, problem.weights[2:]
        return kernel == (3, 3) and stride == dilation == (1, 1) and groups == 1

    @staticmethod
    def pays(problem: ConvolutionShape) -> bool:
        """Says whether transforms cost less than they save, of a problem that `applies` accepts."""
        height, width = problem.outputs
        tiles = problem.images[0] * -(-height // _OUT) * -(-width // _OUT)
        return min(problem.weights[:2]) >= _CHANNELS and tiles >= _TILES

    def images(self, x: Tensor) -> Tensor:
        """Cuts images into tiles of 6x6, transformed: (36, T, C)."""
        _, _, b = _matrices(x.dtype)
        n, c, height, width = x.shape
        rows, columns = self._tiles
        p0, p1 = self.problem.geometry.padding
        # The last tiles reach beyond the outputs, over zeros.
        below = _OUT * rows + _KERNEL - 1 - p0 - height
        right = _OUT * columns + _KERNEL - 1 - p1 - width
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, p1, right, p0, below)).contiguous()
        image, row, column = padded.stride()[:3]
        tiles = padded.as_strided(
            (_IN, _IN, n, rows, columns, c), (row, column, image, _OUT * row, _OUT * column, 1)
        )
        return (b @ tiles.reshape(_IN**2, -1)).view(_IN**2, -1, c)

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """Transforms kernels to the size of tiles: (36, O, C)."""
        _, g, _ = _matrices(w.dtype)
        o, c = w.shape[:2]
        shape = (_IN**2, o * c)
        form = w.new_empty(shape) if keep else _scratch.take("weights", shape, w.dtype)
        torch.mm(g, w.permute(2, 3, 0, 1).reshape(_KERNEL**2, -1), out=form)
        return form.view(_IN**2, o, c)

    def gradients(self, gy: Tensor) -> Tensor:
        """Cuts output gradients into tiles of 4x4, transformed: (36, T, O)."""
        a, _, _ = _matrices(gy.dtype)
        n, o, height, width = gy.shape
        rows, columns = self._tiles
        below, right = _OUT * rows - height, _OUT * columns - width
        padded = F.pad(gy.permute(0, 2, 3, 1), (0, 0, 0, right, 0, below))
        tiles = padded.reshape(n, rows, _OUT, columns, _OUT, o).permute(2, 4, 0, 1, 3, 5)
        # Outputs are Aᵀ[(G w) ∘ (Bᵀ x)] on both sides: derivatives take transposes of A, G and Bᵀ.
        return (a.t() @ tiles.reshape(_OUT**2, -1)).view(_IN**2, -1, o)

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        a, _, _ = _matrices(images.dtype)
        n, (rows, columns) = self.problem.images[0], self._tiles
        height, width = self.problem.outputs
        y = (a @ _product(images, weights.transpose(1, 2)).flatten(1)).view(
            _OUT, _OUT, n, rows, columns, -1
        )
        whole = y.permute(2, 3, 0, 4, 1, 5).reshape(n, _OUT * rows, _OUT * columns, -1)
        if bias is not None:
            whole += bias
        return whole[:, :height, :width].permute(0, 3, 1, 2)

    def input_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """Multiplies gradients by weights in each element; tiles overlap by two pixels."""
        _, _, b = _matrices(gradients.dtype)
        n, c, height, width = self.problem.images
        rows, columns = self._tiles
        p0, p1 = self.problem.geometry.padding
        tiles = (b.t() @ _product(gradients, weights).flatten(1)).view(
            _IN, _IN, n, rows, columns, c
        )
        tiles = tiles.permute(2, 3, 0, 4, 1, 5)  # (N, rows, 6, columns, 6, C)
        padded = tiles.new_zeros(n, rows + 1, _OUT, columns + 1, _OUT, c)
        # Tiles of 6x6 lie 4 apart: the last two rows and columns belong to the next tile as well.
        over = _IN - _OUT
        padded[:, :-1, :, :-1] = tiles[:, :, :_OUT, :, :_OUT]
        padded[:, 1:, :over, :-1] += tiles[:, :, _OUT:, :, :_OUT]
        padded[:, :-1, :, 1:, :over] += tiles[:, :, :_OUT, :, _OUT:]
        padded[:, 1:, :over, 1:, :over] += tiles[:, :, _OUT:, :, _OUT:]
        whole = padded.view(n, _OUT * (rows + 1), _OUT * (columns + 1), c)
        return whole[:, p0 : p0 + height, p1 : p1 + width].permute(0, 3, 1, 2)

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        _, g, _ = _matrices(gradients.dtype)
        o, c = self.problem.weights[:2]
        products = _product(gradients.transpose(1, 2), images)
        return (g.t() @ products.transpose(0, 1)).view(o, _KERNEL, _KERNEL, c).permute(0, 3, 1, 2)
