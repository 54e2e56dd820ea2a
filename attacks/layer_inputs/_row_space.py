"""The row space of a layer's gradient, in coordinates whose errors are alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim_attacks.layer_inputs._layers import Layer

_ROUNDING = 2.0**-24
"""Relative error of an entry in float32, of the gradient's rms."""
_VISIBLE = 3.0
"""Times the largest singular value of mere noise, from which on one is an image's."""
_CLEAR, _ZERO = 5.0, 8.0
"""Times what rows leave of it that they leave of any other combination of columns at least, and
standard deviations of their errors that they leave of it at most: rounding is not the same in
each."""


@dataclass(frozen=True)
class Signal:
    """What is known of an image's error signal."""

    combination: Tensor | None
    """(r,), of the gradient's columns, of unit length. None where several may be."""
    errors: Tensor | None = None
    """(r, r - 1), of the combination: independent, and each of one standard deviation."""


@dataclass(frozen=True)
class RowSpace:
    """The strongest singular directions of a gradient, at their lengths.

    Entries of `rows` and `columns` all have errors of the same deviation.
    """

    rows: Tensor
    """(r, n), or (r, n + 1) with a bias, orthogonal."""
    columns: Tensor
    """(m, r), orthogonal. The gradient is columns @ diag(1 / lengths) @ rows."""
    lengths: Tensor
    """(r,)."""
    deviation: float
    """Standard deviation of the error of an entry: rounding, or noise."""
    separate: bool
    """Whether there is a direction for each image."""

    @staticmethod
    def of(layer: Layer, count: int) -> RowSpace:
        """Decomposes the gradient of a batch of `count` images: r <= count, as far as noise lets.

        Raises:
            AttackFailed: the layer is too small for as many images, nothing is left of its
                gradient, or it is of other inputs besides.
        """
        rows, columns = layer.gradient.shape
        if count > min(rows, columns):
            raise AttackFailed(
                f"layer {layer.name} with weights of {rows} x {layer.weights.shape[1]} shows "
                f"{min(rows, columns)} inputs at most, and the update is of {count}"
            )
        left, lengths, right = torch.linalg.svd(layer.gradient, full_matrices=False)
        size = (rows * columns) ** 0.5
        rounding = _ROUNDING * float(lengths.norm()) / size
        rest = lengths[count:]
        spare = max(1, (rows - count) * (columns - count))
        deviation = max(float(rest.square().sum() / spare) ** 0.5, 0.1 * rounding)
        edge = deviation * (rows**0.5 + columns**0.5)
        visible = int((lengths[:count] > _VISIBLE * edge).sum())
        if not visible:
            raise AttackFailed(f"noise hides the row space of the gradient of layer {layer.name}")
        kept = lengths[:visible]
        return RowSpace(
            rows=kept[:, None] * right[:visible],
            columns=left[:, :visible] * kept,
            lengths=kept,
            deviation=deviation,
            separate=visible == count,
        )

    def signal(self, off: Tensor) -> Signal | None:
        """Finds the combination of columns that is 0 at rows `off` (m,): an image's error signal.

        None if no combination is.
        """
        number = int(off.sum())
        if number < self.rank:
            return Signal(None)
        _, lengths, right = torch.linalg.svd(self.columns[off], full_matrices=False)
        noise = self.deviation * number**0.5
        if float(lengths[-1]) > _ZERO * noise:
            return None
        if self.rank > 1 and float(lengths[-2]) < _CLEAR * max(noise, float(lengths[-1])):
            return Signal(None)
        return Signal(right[-1], self.deviation * right[:-1].T / lengths[:-1])

    @property
    def rank(self) -> int:
        """r."""
        return len(self.rows)
