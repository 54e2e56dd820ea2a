"""The rows and coefficients that a quadratic predictor is made of.

Q_j = sym(A_j S) with A_j = X' diag(α_j) X, a matrix for each class j. With S positive definite A_j
is the only solution of a Lyapunov equation. All A_j are diagonal in the same rows, so that the rows
are eigenvectors of one mixture of the A_j over another (Leurgans, Ross and Abel, A Decomposition
for Three-Way Arrays, SIAM J. Matrix Anal. Appl. 1993). It takes independent rows and coefficients
of which no two rows' are proportional. Of a row the length and the sign remain open.

Who knows all rows but one, as they are, needs neither: less what the known x_i x_i' span, every A_j
is a multiple of one matrix, the same part of the missing x x', which Gauss-Newton steps find.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.words import number_of


def pack(symmetric: Tensor) -> Tensor:
    """Packs symmetric (n, k, k) as vectors (n, k (k + 1) / 2) of the same inner products."""
    row, column = torch.triu_indices(*symmetric.shape[1:], device=symmetric.device)
    return symmetric[:, row, column] * _weights(row, column, symmetric)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Unpacks vectors (n, k (k + 1) / 2) into matrices (n, k, k), k = `size`; inverts `pack`."""
    row, column = torch.triu_indices(size, size, device=packed.device)
    symmetric = packed.new_zeros(len(packed), size, size)
    entries = packed / _weights(row, column, packed)
    symmetric[:, row, column] = symmetric[:, column, row] = entries
    return symmetric


def _weights(row: Tensor, column: Tensor, like: Tensor) -> Tensor:
    # An entry off the diagonal stands twice in the matrix: √2 keeps inner products.
    return torch.where(row == column, 1.0, 2.0).to(like.dtype).sqrt()


_TRIES = 8  # pairs of mixtures, of which the best is kept

_RANK = 1e-9  # share of the largest singular value below which one is rounding

_MISSED = 1e-6  # share of Q that rows and coefficients may fail to explain

_STARTS = 4  # eigenvectors, of either end, from which a missing row is searched

_STEPS = 60  # Gauss-Newton steps from each of them

_LARGEST = 10**8  # entries of all x x' together that are held at once


def decompose_form(
    form: Tensor, kernel: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Decomposes `form` Q (c, d, d), given `kernel` S (d, d), into rows (n, d) and α (n, c).

    Rows have length 1 and arbitrary signs. Raises AttackFailed if Q does not tell them apart.
    """
    parts = _unsmooth(form, kernel)
    c, d = parts.shape[:2]
    left_vectors, values, _ = torch.linalg.svd(
        parts.transpose(0, 1).reshape(d, c * d), full_matrices=False
    )
    # All A_j have their columns in the span of the n rows, which leaves n by n problems.
    basis = left_vectors[:, values > _RANK * values[0]]
    inner = basis.T @ parts @ basis
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(_TRIES):
        mixed = torch.randn(2, c, generator=generator, dtype=torch.float64)
        over, under = torch.einsum("mc,cij->mij", mixed, inner)
        solved, info = torch.linalg.inv_ex(under)
        # A random mixture may be singular: others are drawn.
        if int(info):
            continue
        # Leurgans, Ross and Abel 1993: both mixtures are diagonal in the rows.
        vectors = torch.linalg.eig(over @ solved).eigenvectors
        # Of rows with equal ratios and of no such rows at all they may be complex: then they fail.
        rows = torch.nn.functional.normalize(vectors.real.T @ basis.T, dim=1)
        # Least squares for Σ_k α_kj x_k x_k' = A_j; <x x', y y'> = (x'y)² makes d² equations n.
        gram, right = (rows @ rows.T).square(), torch.einsum("ki,cij,kj->kc", rows, parts, rows)
        alpha = torch.linalg.lstsq(gram, right, driver="gelsd").solution
        residual = torch.einsum("kc,ki,kj->cij", alpha, rows, rows) - parts
        error = float(residual.norm() / parts.norm())
        if best is None or error < best[0]:
            best = error, rows, alpha
    if best is None or not best[0] < _MISSED:
        raise AttackFailed(
            f"the predictor does not tell its rows apart: it is of no fewer than {d}, of rows with "
            "the same coefficients, or noise was added to it"
        )
    return best[1], best[2]


def complete_rows(form: Tensor, kernel: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `known` rows (n - 1, d), then the one missing in the form, and α (n, c) of all.

    `form` and `kernel` are as for `decompose_form`. AttackFailed unless exactly one is missing.
    """
    parts = _unsmooth(form, kernel)
    d = parts.shape[1]
    entries = d * (d + 1) // 2
    # The known x_i x_i' must leave more directions than the missing row has entries.
    if len(known) + d > entries or len(known) * entries > _LARGEST:
        raise AttackFailed(
            f"{number_of(len(known), 'known row')} of {number_of(d, 'entry', 'entries')} are too "
            "many to see a missing one behind them"
        )
    packed, spanned = pack(parts), pack(known[:, :, None] * known[:, None, :])
    basis = torch.linalg.qr(spanned.T).Q
    # What known rows span is projected out: each A_j becomes α_j times one matrix.
    rest = packed - (packed @ basis) @ basis.T
    _, values, target = torch.linalg.svd(rest, full_matrices=False)
    # One missing row leaves multiples of a single matrix: rank 1, and not 0.
    if values[0] < _RANK * packed.norm() or values[1:].norm() > _MISSED * values[0]:
        raise AttackFailed(
            "the predictor is not of the known rows and one other: none is missing or several are, "
            "or noise was added to it"
        )
    missing = _missing_row(target[0], basis, d)
    rows = torch.cat([known, missing[None]])
    spanned = pack(rows[:, :, None] * rows[:, None, :])
    alpha = torch.linalg.lstsq(spanned.T, packed.T, driver="gelsd").solution
    return rows, alpha


def _missing_row(target: Tensor, basis: Tensor, dimension: int) -> Tensor:
    """Finds x (d,) of length 1 with x x', projected off `basis` (entries, m), along ± `target`."""
    whole = unpack(target[None], dimension)[0]
    _, vectors = torch.linalg.eigh(whole)
    best = torch.inf, vectors[:, 0]
    for start in (*vectors[:, :_STARTS].T, *vectors[:, -_STARTS:].T.flip(0)):
        # Coefficients may be negative: the start tells which sign of the target is x x'.
        x, sign, damping = start, float(torch.sign(start @ whole @ start)) or 1.0, 1e-3
        residual = _residual(x, sign * target, basis)
        for _ in range(_STEPS):
            # ∂(x x')/∂x_i = e_i x' + x e_i'.
            slopes = _eye(x)[:, :, None] * x
            slopes = pack(slopes + slopes.transpose(1, 2))
            slopes = slopes - (slopes @ basis) @ basis.T
            gram, pull = slopes @ slopes.T, slopes @ residual
            step = torch.linalg.solve(gram + damping * gram.diagonal().mean() * _eye(x), pull)
            trial = _residual(x - step, sign * target, basis)
            if trial.norm() < residual.norm():
                x, residual, damping = x - step, trial, damping / 10
            else:
                damping *= 10
            if residual.norm() < _MISSED**2 or damping > 1e8:
                break
        if float(residual.norm()) < best[0]:
            best = float(residual.norm()), x
        if best[0] < _MISSED:
            break
    else:
        raise AttackFailed("the row that the known ones leave was not found in the predictor")
    return torch.nn.functional.normalize(best[1], dim=0)


def _residual(x: Tensor, target: Tensor, basis: Tensor) -> Tensor:
    """Computes x x', projected off `basis`, minus `target`: (entries,)."""
    packed = pack(torch.outer(x, x)[None])[0]
    return packed - basis @ (packed @ basis) - target


def _eye(like: Tensor) -> Tensor:
    return torch.eye(len(like), dtype=like.dtype)


def _unsmooth(form: Tensor, kernel: Tensor) -> Tensor:
    """Solves Q_j = (A_j S + S A_j) / 2 for A_j (c, d, d)."""
    scales: Tensor
    turn: Tensor
    scales, turn = torch.linalg.eigh(kernel)
    if not float(scales[0]) > _RANK * float(scales[-1]):
        raise AttackFailed(
            "the kernel's neurons are fewer than the features, and its predictor hides directions"
        )
    turned = turn.T @ form @ turn
    # A Lyapunov equation, diagonal in the eigenvectors of S.
    return turn @ (2 * turned / (scales[:, None] + scales)) @ turn.T
