"""The rows and coefficients that a quadratic predictor is made of.

Q_j = sym(A_j S) with A_j = X' diag(α_j) X, a matrix for each class j. With S positive definite A_j
is the only solution of a Lyapunov equation. All A_j are diagonal in the same rows, so that the rows
are eigenvectors of one mixture of the A_j over another: simultaneous diagonalization (Leurgans,
Ross and Abel, A Decomposition for Three-Way Arrays, SIAM J. Matrix Anal. Appl. 1993, after
Jennrich). It takes independent rows, of which there can be no more than entries in a row, and
coefficients of which no two rows' are proportional. Of a row the length and the sign remain open:
s x with α / s² predict the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.adversary import AttackFailed

_TRIES = 8
"""Pairs of mixtures, of which the best is kept."""

_RANK = 1e-9
"""Share of the largest singular value below which one is rounding."""

_MISSED = 1e-6
"""Share of Q that rows and coefficients may fail to explain."""


def decomposed(form: Tensor, kernel: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows of length 1 (n, d), coefficients (n, c)) of `form` Q (c, d, d).

    `kernel` is S (d, d). The signs of the rows are arbitrary.

    Raises:
        AttackFailed: Q is not of that make, or does not tell its rows apart.
    """
    parts = _unsmoothed(form, kernel)
    c, d = parts.shape[:2]
    left, values, _ = torch.linalg.svd(parts.transpose(0, 1).reshape(d, c * d), full_matrices=False)
    basis = left[:, values > _RANK * values[0]]
    inner = basis.T @ parts @ basis
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(_TRIES):
        mixed = torch.randn(2, c, generator=generator, dtype=torch.float64)
        over, under = torch.einsum("mc,cij->mij", mixed, inner)
        solved, info = torch.linalg.inv_ex(under)
        if int(info):
            continue
        vectors = torch.linalg.eig(over @ solved).eigenvectors
        # Of rows with equal ratios and of no such rows at all they may be complex: then they fail.
        rows = torch.nn.functional.normalize(vectors.real.T @ basis.T, dim=1)
        alpha = _coefficients(rows, parts)
        missed = torch.einsum("kc,ki,kj->cij", alpha, rows, rows) - parts
        share = float(missed.norm() / parts.norm())
        if best is None or share < best[0]:
            best = share, rows, alpha
    if best is None or not best[0] < _MISSED:
        raise AttackFailed(
            f"the predictor does not tell its rows apart: it is of {d} rows or more, of rows with "
            "the same coefficients, or noise was added to it"
        )
    return best[1], best[2]


def _unsmoothed(form: Tensor, kernel: Tensor) -> Tensor:
    """(c, d, d) A_j of Q_j = (A_j S + S A_j) / 2."""
    scales, turn = torch.linalg.eigh(kernel)
    if not float(scales[0]) > _RANK * float(scales[-1]):
        raise AttackFailed(
            "the kernel's neurons are fewer than the features, and its predictor hides directions"
        )
    turned = turn.T @ form @ turn
    return turn @ (2 * turned / (scales[:, None] + scales)) @ turn.T


def _coefficients(rows: Tensor, parts: Tensor) -> Tensor:
    """(n, c): the least-squares α of Σ_k α_kj x_k x_k' = A_j."""
    gram = (rows @ rows.T).square()
    right = torch.einsum("ki,cij,kj->kc", rows, parts, rows)
    solution: Tensor = torch.linalg.lstsq(gram, right, driver="gelsd").solution
    return solution
