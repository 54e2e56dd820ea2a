"""Winograd's minimal filtering F(4x4, 3x3): 3x3 convolutions with a quarter of the multiplications.

Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016, section 4: an output
tile of 4x4 is y = Aᵀ [(G w Gᵀ) ⊙ (Bᵀ x B)] A for a 6x6 tile x of the padded image, the sum over
channels taken inside the brackets. Both gradients are the transposes of that trilinear form, so
images, weights and output gradients are each transformed once and meet in matrix products. Float32
results differ from a direct convolution's by some 3e-6 of their size (measured at 64 to 256
channels, five times the rounding of the direct one).
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.fast_autograd._convolution import Algorithm, Problem

_OUT, _KERNEL = 4, 3
_IN = _OUT + _KERNEL - 1
# Interpolation points 0, ±1, ±2 and infinity; Aᵀ, G and Bᵀ as in the paper.
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
"""Channels in and out, and tiles over the batch, from which it is faster than the direct kernels on
a CPU (measured on ConvNets and ResNet-18 at 64 to 512 channels, 1 to 512 tiles)."""


@lru_cache
def _matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(16, 36), (36, 9), (36, 36): what Aᵀ, G and Bᵀ do to both sides of a tile."""
    both = [torch.tensor(m, dtype=torch.float64) for m in (_AT, _G, _BT)]
    a, g, b = (torch.kron(m, m).to(dtype) for m in both)
    return a, g, b


class _Scratch(threading.local):
    """Memory for what is consumed at once, one piece per use; fresh memory is slow.

    (MKL's batched product of 9 MB: 17 ms into fresh pages, 1 ms into used ones.)
    """

    def __init__(self) -> None:
        self._pieces: dict[str, Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialized; valid until the next `take` for the same use."""
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
class Winograd(Algorithm):
    """F(4x4, 3x3) for stride 1; T tiles cover the outputs of the batch."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        height, width = problem.outputs
        self._tiles = -(-height // _OUT), -(-width // _OUT)

    @staticmethod
    def applies(problem: Problem) -> bool:
        """To kernels of 3x3, stride 1."""
        (stride, _, dilation, groups), kernel = problem.geometry, problem.weights[2:]
        return kernel == (3, 3) and stride == dilation == (1, 1) and groups == 1

    @staticmethod
    def pays(problem: Problem) -> bool:
        """Where the transforms cost less than the multiplications that they save."""
        height, width = problem.outputs
        tiles = problem.images[0] * -(-height // _OUT) * -(-width // _OUT)
        return min(problem.weights[:2]) >= _CHANNELS and tiles >= _TILES

    def images(self, x: Tensor) -> Tensor:
        """(36, T, C)."""
        _, _, b = _matrices(x.dtype)
        n, c, height, width = x.shape
        rows, columns = self._tiles
        p0, p1 = self.problem.geometry.padding
        below = _OUT * rows + _KERNEL - 1 - p0 - height
        right = _OUT * columns + _KERNEL - 1 - p1 - width
        padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, p1, right, p0, below)).contiguous()
        image, row, column = padded.stride()[:3]
        tiles = padded.as_strided(
            (_IN, _IN, n, rows, columns, c), (row, column, image, _OUT * row, _OUT * column, 1)
        )
        return (b @ tiles.reshape(_IN**2, -1)).view(_IN**2, -1, c)

    def weights(self, w: Tensor, *, keep: bool = True) -> Tensor:
        """(36, O, C)."""
        _, g, _ = _matrices(w.dtype)
        o, c = w.shape[:2]
        shape = (_IN**2, o * c)
        form = w.new_empty(shape) if keep else _scratch.take("weights", shape, w.dtype)
        torch.mm(g, w.permute(2, 3, 0, 1).reshape(_KERNEL**2, -1), out=form)
        return form.view(_IN**2, o, c)

    def gradients(self, gy: Tensor) -> Tensor:
        """(36, T, O)."""
        a, _, _ = _matrices(gy.dtype)
        n, o, height, width = gy.shape
        rows, columns = self._tiles
        below, right = _OUT * rows - height, _OUT * columns - width
        padded = F.pad(gy.permute(0, 2, 3, 1), (0, 0, 0, right, 0, below))
        tiles = padded.reshape(n, rows, _OUT, columns, _OUT, o).permute(2, 4, 0, 1, 3, 5)
        return (a.t() @ tiles.reshape(_OUT**2, -1)).view(_IN**2, -1, o)

    def output(self, images: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
        """Per element of the transformed tiles, images times weights."""
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
        """Per element, gradients times weights; tiles overlap by two pixels."""
        _, _, b = _matrices(gradients.dtype)
        n, c, height, width = self.problem.images
        rows, columns = self._tiles
        p0, p1 = self.problem.geometry.padding
        tiles = (b.t() @ _product(gradients, weights).flatten(1)).view(
            _IN, _IN, n, rows, columns, c
        )
        tiles = tiles.permute(2, 3, 0, 4, 1, 5)  # (N, rows, 6, columns, 6, C)
        padded = tiles.new_zeros(n, rows + 1, _OUT, columns + 1, _OUT, c)
        over = _IN - _OUT
        padded[:, :-1, :, :-1] = tiles[:, :, :_OUT, :, :_OUT]
        padded[:, 1:, :over, :-1] += tiles[:, :, _OUT:, :, :_OUT]
        padded[:, :-1, :, 1:, :over] += tiles[:, :, :_OUT, :, _OUT:]
        padded[:, 1:, :over, 1:, :over] += tiles[:, :, _OUT:, :, _OUT:]
        whole = padded.view(n, _OUT * (rows + 1), _OUT * (columns + 1), c)
        return whole[:, p0 : p0 + height, p1 : p1 + width].permute(0, 3, 1, 2)

    def weight_gradient(self, gradients: Tensor, images: Tensor, weights: Tensor) -> Tensor:
        """Per element, the sum over tiles of gradients times images."""
        _, g, _ = _matrices(gradients.dtype)
        o, c = self.problem.weights[:2]
        products = _product(gradients.transpose(1, 2), images)
        return (g.t() @ products.transpose(0, 1)).view(o, _KERNEL, _KERNEL, c).permute(0, 3, 1, 2)
