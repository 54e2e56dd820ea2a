"""The spline bases of single images out of a space that several of them span.

b(u) lies on a curve. All quadratic forms that vanish there (b_k b_l = 0 where two functions'
supports do not meet; (Σ ξ_k b_k)² = Σ_k b_k Σ_k η_k b_k, and so on) vanish on an image's bases at
every entry, and hardly on anything else in the span. In coordinates c of the span that is linear in
c c', so the solutions are a linear space of symmetric matrices; where it is that of the N images'
c_n c_n', two of its members are diagonalized by the same c_n: an eigenvalue problem, without
iterations and without any start.

De Lathauwer, Castaing and Cardoso, Fourth-Order Cumulant-Based Blind Identification of
Underdetermined Mixtures, IEEE Trans. Signal Processing 55, 2007, section III, for forms that vanish
on matrices of rank one; Johnston, Lovitz and Vijayaraghavan, Computing Linear Sections of
Varieties, FOCS 2023, for those of any variety.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.models.splines import spline_basis
from fedsim_attacks.closed_form._symmetric import pack, unpack

_SAMPLES = 32
"""Points of a piece of the curve; the forms' products are determined by 2 degree + 1."""
_VANISHING = 1e-10
_PAIRS = 10
"""Random pairs of members that are diagonalized; the best conditioned counts."""


def quadrics(degree: int, intervals: int) -> Tensor:
    """Finds orthonormal symmetric Q (q, K, K) float64 with b(u)' Q b(u) = 0 for all u; q >= 0."""
    u = torch.linspace(-1, 1, _SAMPLES * intervals + 1, dtype=torch.float64)
    basis = spline_basis(u, degree, intervals)
    products = pack(basis[:, :, None] * basis[:, None, :])
    _, sizes, directions = torch.linalg.svd(products)
    rank = int((sizes > _VANISHING * sizes[0]).sum())
    return unpack(directions[rank:], basis.shape[1])


def unmix(span: Tensor, forms: Tensor, rng: torch.Generator) -> Tensor:
    """Finds the members (N, d, K) of `span`, orthonormal, on which the forms (q, K, K) vanish.

    They are scaled to Σ_k b_k = 1 on average over the d entries, and come in no particular order.
    """
    count = len(span)
    if count > 1:
        equations = torch.einsum("ajk,qkl,bjl->qjab", span, forms, span).flatten(0, 1)
        triangle = torch.linalg.qr(pack(equations), mode="r").R
        _, _, directions = torch.linalg.svd(triangle)
        members = unpack(directions[-count:], count)
        span = torch.einsum("na,ajk->njk", _diagonalizers(members, rng), span)
    total = span.sum(2).mean(1)
    return span / total[:, None, None]


def _diagonalizers(members: Tensor, rng: torch.Generator) -> Tensor:
    """Finds c (N, N) such that the c_n c_n' span what `members` (N, N, N) span."""
    best, diagonalizers = -1.0, members[0]
    for _ in range(_PAIRS):
        weights = torch.randn(2, len(members), generator=rng, dtype=members.dtype).to(members)
        one, two = torch.einsum("ta,aij->tij", weights, members)
        vectors = torch.linalg.eig(one @ torch.linalg.pinv(two))[1].real.T
        # The share of each c c' that lies in the space: 1 for solutions.
        inside = torch.einsum("aij,ni,nj->na", members, vectors, vectors).norm(dim=1)
        share = float((inside / vectors.square().sum(1)).min())
        if share > best:
            best, diagonalizers = share, vectors
    return diagonalizers
