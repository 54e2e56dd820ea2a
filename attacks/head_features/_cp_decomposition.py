"""Components that the slices of a small tensor share: canonical polyadic decomposition.

The alternating least squares are TensorLy's `parafac` (Kossaifi, Panagakis, Anandkumar and Pantic,
TensorLy: Tensor Learning in Python, JMLR 2019), from starts of our own: its random starts miss
components of 8 x 8 x 8 tensors, and its power iteration with deflation is for orthogonal ones.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_STARTS = 5
_ROUNDS = 100
_TOLERANCE = 1e-12
"""Change of the relative error from one round to the next at which the rounds end."""
_RIDGE = 1e-14
"""Of the least squares for a tensor of norm 1: two equal columns must not make them singular."""


def components(tensor: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Finds unit u_c with T_ijs ≈ Σ_c u_ci u_cj z_cs: (r, r), and the relative residual (0-d).

    Starts come from the simultaneous diagonalization of two random contractions (Kuleshov, Chaganty
    and Liang, Tensor Factorization via Matrix Factorization, AISTATS 2015, for components that need
    not be orthogonal); the decomposition that leaves least is kept. Order and signs are arbitrary.
    All draws come from `rng`, and TensorLy's choice of a backend stays as it was.

    Args:
        tensor: T (r, r, s), finite, each slice T[:, :, k] symmetric; a symmetric (r, r, r) is one.
        rng: of the contractions.

    >>> axes = torch.eye(3, dtype=torch.float64)
    >>> cubes = torch.einsum("ci,cj,ck->ijk", axes, axes, axes)
    >>> found, left = components(cubes, torch.Generator().manual_seed(0))
    >>> bool(torch.allclose(found.abs().sort(0).values[-1], torch.ones(3, dtype=torch.float64)))
    True
    """
    rank = len(tensor)
    norm = torch.linalg.vector_norm(tensor)
    if not norm:
        return torch.eye(rank).to(tensor), norm.new_ones(())
    tensor = tensor.cpu() / norm.cpu()
    best, least = torch.eye(rank).to(tensor), float("inf")
    for _ in range(_STARTS):
        found, residual = _alternate(tensor, _start(tensor, rng))
        if residual < least:
            best, least = found, residual
    return best.to(norm), norm.new_tensor(least)


def _start(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Computes eigenvectors (r, r) of one random contraction relative to another, in rows."""
    one, two = (
        tensor @ torch.randn(tensor.shape[2], generator=rng, dtype=tensor.dtype) for _ in range(2)
    )
    vectors = torch.linalg.eig(one @ torch.linalg.pinv(two))[1].T
    # A conjugate pair x ± iy becomes x + y and x - y: its real parts would be one vector twice.
    return F.normalize(vectors.real + vectors.imag, dim=1)


def _alternate(tensor: Tensor, start: Tensor) -> tuple[Tensor, float]:
    import tensorly
    from tensorly.cp_tensor import CPTensor
    from tensorly.decomposition import parafac

    rank, slices = len(tensor), tensor.shape[2]
    pairs = torch.einsum("ci,cj->cij", start, start).flatten(1)
    last = torch.linalg.pinv(pairs.T) @ tensor.reshape(rank * rank, slices)
    factors = [start.T.numpy().copy(), start.T.numpy().copy(), last.T.numpy().copy()]
    with tensorly.backend_context("numpy", local_threadsafe=True):
        found, errors = parafac(
            tensor.numpy(),
            rank,
            n_iter_max=_ROUNDS,
            init=CPTensor((np.ones(rank), factors)),
            tol=_TOLERANCE,
            l2_reg=_RIDGE,
            return_errors=True,
        )
    residual = float(errors[-1])
    return F.normalize(torch.from_numpy(found.factors[0]).T, dim=1), residual
