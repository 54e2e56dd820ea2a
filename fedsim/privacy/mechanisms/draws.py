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
    """(n, n) R with R R' = K: Cholesky's, or by eigenvectors where rounding makes K singular."""
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(gram)
    if int(info):
        values, vectors = torch.linalg.eigh(gram)
        lower = vectors * values.clamp(min=0).sqrt()
    return lower


def sampled_covariance(root: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(n, n) K̃ = (1/k) Σ g g' of k = `count` draws g of N(0, K), K = root root': Algorithm 1.

    Zeros for a `count` of 0.
    """
    inner = torch.zeros(root.shape[1], root.shape[1], dtype=root.dtype)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        part = normal((root.shape[1], size), generator, root.dtype)
        inner += part @ part.T
    return root @ inner @ root.T / max(count, 1)


def truncated_laplace(
    value: Tensor, scale: float, bound: float, generator: torch.Generator
) -> Tensor:
    """`value` plus noise of density ~ exp(-|x| / scale) within ± bound on every entry."""
    shape = value.shape
    share = uniform(shape, generator)
    size = -scale * torch.log1p(math.expm1(-bound / scale) * share)
    return value + signs(shape, generator) * size
