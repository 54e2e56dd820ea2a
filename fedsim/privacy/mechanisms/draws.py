"""The random draws of mechanisms on statistics: truncated Laplace noise, and Gaussian sampling.

Tensors are float64 on the CPU; all randomness is the generator's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.rng import normal, signs, uniform

_CHUNK = 4096
"""Draws that are held at once."""


def square_root(gram: Tensor) -> Tensor:
    """Returns an (n, n) root R of the kernel matrix `gram` K, which may be singular: R R' = K."""
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(gram)
    if int(info):
        # Rounding may leave eigenvalues below 0, which have no root.
        values, vectors = torch.linalg.eigh(gram)
        lower = vectors * values.clamp(min=0).sqrt()
    return lower


def sampled_covariance(root: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draws (n, n) K̃ = (1/k) Σ g g' of k = `count` draws g of N(0, K), where K = root root'.

    A `count` of 0 gives zeros. Source: Algorithm 1 of DP-NTK regression.
    """
    inner = torch.zeros(root.shape[1], root.shape[1], dtype=root.dtype)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        part = normal((root.shape[1], size), generator, root.dtype)
        # Squares are summed before the root is applied: two
        # products in all, in place of two a chunk.
        inner += part @ part.T
    return root @ inner @ root.T / max(count, 1)


def truncated_laplace(
    value: Tensor, scale: float, bound: float, generator: torch.Generator
) -> Tensor:
    """Returns `value`, of any shape, with noise of density ~ exp(-|x| / scale) within ± `bound`."""
    shape = value.shape
    share = uniform(shape, generator)
    # The inverse distribution function of the truncated exponential, at a uniform share.
    size = -scale * torch.log1p(math.expm1(-bound / scale) * share)
    return value + signs(shape, generator) * size
