"""Symmetric matrices as vectors of their distinct entries, with the same inner products."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(symmetric: Tensor) -> Tensor:
    """Packs (n, k, k) into (n, k (k + 1) / 2), an isometry."""
    row, column = torch.triu_indices(*symmetric.shape[1:], device=symmetric.device)
    return symmetric[:, row, column] * _weights(row, column, symmetric)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Unpacks (n, k (k + 1) / 2) into (n, k, k) for a k of `size`: the inverse of `pack`."""
    row, column = torch.triu_indices(size, size, device=packed.device)
    symmetric = packed.new_zeros(len(packed), size, size)
    entries = packed / _weights(row, column, packed)
    symmetric[:, row, column] = symmetric[:, column, row] = entries
    return symmetric


def _weights(row: Tensor, column: Tensor, like: Tensor) -> Tensor:
    return torch.where(row == column, 1.0, 2.0).to(like.dtype).sqrt()
