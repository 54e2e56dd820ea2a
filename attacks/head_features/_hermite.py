"""Moments Σ_j g_j H_p(w_j) with multivariate Hermite functions, contracted before they are formed.

H_2(w) = w w' - I and H_3(w) = w⊗³ - w ⊗~ I (Liu et al., Data Reconstruction Attacks and Defenses,
Appendix B); H_4(w) = w⊗⁴ - w w' ⊗~ I + I ⊗~ I, over the 6 and 3 ways to place the indices. By
Stein's lemma E[g(w) H_p(w)] = E[∇^p g(w)] for standard normal w (their Lemma 3.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 4096


def second(g: Tensor, w: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_2(w_j): (d, d), from values (m,) and points (m, d). O(m d²)."""
    moment = w.T @ (g[:, None] * w) / len(w)
    return moment - g.mean() * torch.eye(w.shape[1]).to(w)


def third_along(g: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_3(w_j)(I, I, a): (d, d), a (d,) of length 1. O(m d²)."""
    along = w @ a
    moment = w.T @ ((g * along)[:, None] * w) / len(w)
    mean = (g[:, None] * w).mean(0)
    cross = torch.outer(mean, a)
    return moment - (g * along).mean() * torch.eye(w.shape[1]).to(w) - cross - cross.T


def third(g: Tensor, y: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_3(V'w_j): (r, r, r), from y = V'w (m, r), V orthonormal.

    This is T̂(V, V, V) = (1/m) Σ_j g_j H_3(w_j)(V, V, V), without d³ entries. O(m r³), in chunks.
    """
    mean = (g[:, None] * y).mean(0)
    eye = torch.eye(y.shape[1]).to(y)
    return _cubes(g, y) - _placings(torch.einsum("i,jk->ijk", mean, eye))


def fourth_along(g: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j H_4(V'w_j)(I, I, I, a): (r, r, r), a (r,) of length 1."""
    along = g * (y @ a)
    mean = (along[:, None] * y).mean(0)
    square = y.T @ (g[:, None] * y) / len(y)
    eye = torch.eye(y.shape[1]).to(y)
    # a meets w in three of the six placings of w w' and I, and I in the others.
    with_w = _placings(torch.einsum("i,jk->ijk", mean, eye))
    with_eye = _placings(torch.einsum("ij,k->ijk", square - g.mean() * eye, a))
    return _cubes(along, y) - with_w - with_eye


def _cubes(g: Tensor, y: Tensor) -> Tensor:
    """Computes (1/m) Σ_j g_j y_j⊗³."""
    rank = y.shape[1]
    total = y.new_zeros(rank, rank * rank)
    for part, values in zip(torch.split(y, _CHUNK), torch.split(g, _CHUNK), strict=True):
        squares = torch.einsum("ma,mb->mab", part, part).flatten(1)
        total += (values[:, None] * part).T @ squares
    return total.view(rank, rank, rank) / len(y)


def _placings(term: Tensor) -> Tensor:
    """Sums a term that is symmetric in two indices over the three placings of its indices."""
    return term + term.permute(1, 2, 0) + term.permute(2, 0, 1)
