"""Scores of candidates in a linear Gaussian model of a sum of gradients.

A vector v is modelled as v = Σ a_i g_i + ε. The coefficients a_i are independent with means m_i and
variances d_i, and ε is normal with variance s in each of P entries. All that is needed of gradients
are inner products: A = G G', b = G v and |v|², with the gradients g_i as the rows of G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GaussianFit:
    """Holds a fit of the model to one vector."""

    scores: Tensor
    """(n,) z_i = g_i' C_i^-1 x / (g_i' C_i^-1 g_i)^(1/2) of x = v - Σ m_j g_j, where C_i is the
    covariance of v without the term of i. This is the score test of a_i > m_i. It is 0 where g_i
    is 0."""
    precisions: Tensor
    """(n,) g_i' C_i^-1 g_i, the inverse variance of an estimate of a_i."""
    log_likelihood: float
    """Log-likelihood of v, up to a constant that depends on P alone."""


@dataclass(frozen=True, kw_only=True)
class InnerProducts:
    """Holds what the model needs to know of the gradients and of the vector."""

    gram: Tensor
    """(n, n) float64: A, the inner products g_i' g_j of the gradients."""
    inner: Tensor
    """(n,) float64: b, the inner products g_i' v of the gradients and the vector."""
    energy: float
    """|v|²."""
    entries: int
    """P, the number of entries that are compared."""

    def fit(self, mean: Tensor, variance: Tensor, noise: float, *, scored: bool) -> GaussianFit:
        """Fits the model to v.

        Args:
            mean: (n,) m, the means of the coefficients a_i.
            variance: (n,) d > 0, the variances of the coefficients.
            noise: s > 0, the variance of the noise in each entry of v.
            scored: Whether scores and precisions are computed, too; else they are empty.
        """
        # With D = diag(d) and M = I + D^(1/2) A D^(1/2) / s, whose size is n and not P, Woodbury's
        # identity gives both the likelihood and q = D^(1/2) G C^-1 x.
        root = variance.sqrt()
        whitened = root[:, None] * self.gram * root / noise
        whitened.diagonal().add_(1.0)
        factor = torch.linalg.cholesky(whitened)
        towards = torch.mv(self.gram, mean)
        # D^(1/2) G x / s, which M^-1 takes to q.
        right = root * (self.inner - towards) / noise
        solved = torch.cholesky_solve(right[:, None], factor)[:, 0]
        # |x|² without x, whose size is P.
        rest = self.energy - 2 * float(mean @ self.inner) + float(mean @ towards)
        misfit = rest / noise - float(right @ solved)
        # |C| = s^P |M|, and |M| is the squared product of its Cholesky factor's diagonal.
        determinant = self.entries * math.log(noise) + 2 * float(factor.diagonal().log().sum())
        scores = precisions = solved[:0]
        if scored:
            inverse = torch.cholesky_inverse(factor).diagonal()
            # Leaving term i out of C divides by (M^-1)_ii; what is left is 0 for a gradient of 0.
            spread = inverse * (1 - inverse)
            scores = torch.where(spread > 1e-12, solved / spread.clamp(min=1e-12).sqrt(), 0.0)
            # (M^-1)_ii = 1 / (1 + d_i g_i' C_i^-1 g_i), by the same identity.
            precisions = torch.where(spread > 1e-12, (1 / inverse - 1) / variance, 0.0)
        return GaussianFit(
            scores=scores, precisions=precisions, log_likelihood=-(misfit + determinant) / 2
        )
