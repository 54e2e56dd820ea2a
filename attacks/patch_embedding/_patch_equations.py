"""Solves for patches whose embedding's gradient and whose own signals are known.

With tokens t_p = E x_p + b + u_p of P patches x_p (m pixels each), the gradient of the loss in the
position embedding u_p is the token's signal δ_p (d entries), and that in E is

    ∂L/∂E = Σ_p δ_p x_p'

which is d equations for each of the m pixels of the P patches. They are linear: also of several
local steps on the same image, whose signals add up, and whatever factor the update has.

Where d < P, or the equations are disturbed, they are completed by what is known of pixels: their
mean and variance, and that patches nearby are alike. The variance of the disturbance is that of
largest evidence (MacKay, Bayesian interpolation, Neural Computation 1992): of rounding, of noise,
and of what a defense has removed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST = -17.0
_MOST = 3.0
_STEPS = 201
"""Powers of ten of the disturbance's variance that are compared, over the gradient's mean
square."""
_REACH = 0.5
"""Distance over which the correlation of pixels falls to 1/e, in sides of an image."""


class Patches(NamedTuple):
    """Patches that were solved for, and how certain they are."""

    values: Tensor
    """(P, m)."""
    variances: Tensor
    """(P,): of an entry, as far as disturbance leaves it open, in units of `spread`²."""
    unexplained: float
    """Share of the gradient that the patches do not explain."""


def correlation(centers: Tensor) -> Tensor:
    """Correlation of pixels (P, P) of patches whose `centers` (P, 2) are in sides of an image."""
    return torch.exp(-torch.cdist(centers, centers) / _REACH)


def solve(
    signals: Tensor, gradient: Tensor, mean: Tensor, spread: Tensor, alike: Tensor
) -> Patches:
    """Solves ∂L/∂E = Σ_p δ_p x_p' for the patches, in float64.

    Args:
        signals: (P, d) gradient of the position embedding, δ.
        gradient: (d, m), of the patch embedding.
        mean: (m,) of a patch's entries, before anything is seen.
        spread: (m,) their standard deviation.
        alike: (P, P), see `correlation`.
    """
    root = torch.linalg.cholesky(alike)
    # In y with x = mean + root y spread, all entries are known to be of mean 0 and variance 1.
    left = signals.T @ root
    right = (gradient - signals.sum(0)[:, None] * mean) / spread
    rotation, lengths, directions = torch.linalg.svd(left, full_matrices=False)
    seen = rotation.T @ right
    energies = seen.square().mean(1)
    outside = (right.square().sum() - seen.square().sum()).clamp_min(0) / right.shape[1]
    hidden = len(left) - len(lengths)
    scale = float(right.square().mean())
    tried = scale * 10 ** torch.linspace(_LEAST, _MOST, _STEPS, dtype=left.dtype)
    tried = tried.to(left.device)[:, None]
    expected = lengths.square() + tried
    surprise = (energies / expected + expected.log()).sum(1)
    surprise += outside / tried[:, 0] + hidden * tried[:, 0].log()
    noise = tried[int(surprise.argmin()), 0]
    kept = lengths.square() + noise
    turned = root @ directions.T
    values = mean + spread * (turned @ (seen * (lengths / kept)[:, None]))
    # What the prior leaves open is 1 in directions that the equations do not have.
    variances = alike.diagonal() - (turned.square() * (lengths.square() / kept)).sum(1)
    left_over = (gradient - signals.T @ values).square().sum()
    return Patches(values, variances.clamp_min(0), float(left_over / gradient.square().sum()))
