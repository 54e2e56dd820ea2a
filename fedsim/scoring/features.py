"""Metrics of recovered features: the inputs of the model's head, (N, d), in matched order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring.outcome import ScoringError, Unavailable

_DEPENDENT = 1e-12
"""A direction of unit vectors is rounding if its singular value is below this."""


def check_features(features: Tensor, what: str) -> None:
    """Refuses what is not a batch of features.

    Raises:
        ScoringError: not (N, d), or not finite.
    """
    if features.ndim != 2 or features.numel() == 0:
        raise ScoringError(
            f"{what}: expected features of shape (N, d), got {tuple(features.shape)}"
        )
    if not bool(torch.isfinite(features).all()):
        raise ScoringError(f"{what}: the features are not finite")


def feature_cosine(reconstruction: Tensor, truth: Tensor) -> Tensor:
    """Returns the cosine between each pair, (N,) in [-1, 1]; 0 where either is zero."""
    return F.cosine_similarity(reconstruction.double(), truth.double(), dim=1, eps=1e-30)


def feature_error(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns ||r - t|| / ||t|| of each pair, (N,): 0 is exact, 1 is a guess of zero."""
    norm = torch.linalg.vector_norm(truth.double(), dim=1)
    if not bool(norm.all()):
        return Unavailable("a true feature vector is zero, so there is no relative error")
    error = torch.linalg.vector_norm(reconstruction.double() - truth.double(), dim=1)
    relative: Tensor = error / norm
    return relative


def subspace_error(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns how much of each true feature lies outside the reconstructed span, (N,) in [0, 1].

    The norm of the projection of the unit feature onto the orthogonal complement of the span of at
    most N reconstructed features, which have no order, sign or scale here. Source: Liu et al., Data
    Reconstruction Attacks and Defenses, section 4.1, who report its mean. Guessing zero has 1.
    """
    truth = truth.double()
    norm = torch.linalg.vector_norm(truth, dim=1, keepdim=True)
    if not bool(norm.all()):
        return Unavailable("a true feature vector is zero, so it has no direction")
    claimed = reconstruction[: len(truth)].double()
    scale = torch.linalg.vector_norm(claimed, dim=1, keepdim=True)
    claimed = claimed / torch.where(scale > 0, scale, torch.ones_like(scale))
    _, values, basis = torch.linalg.svd(claimed, full_matrices=False)
    basis = basis[values > _DEPENDENT]
    unit = truth / norm
    # Twice is enough (Kahan and Parlett): the second pass removes what rounding left of the first.
    for _ in range(2):
        unit = unit - (unit @ basis.T) @ basis
    outside: Tensor = torch.linalg.vector_norm(unit, dim=1).clamp(max=1)
    return outside


def principal_angles(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the angles in degrees between reconstructed and true feature spans, (N,).

    Ascending, from 0 (a direction of both) to 90; a direction that the at most N reconstructed
    features lack counts as 90. Unlike `subspace_error` they weigh directions that true features
    share no more than those in which they differ. Source: Björck and Golub, Numerical Methods for
    Computing Angles Between Linear Subspaces, 1973, as scipy.linalg.subspace_angles has them.
    """
    from scipy.linalg import subspace_angles

    count = len(truth)
    directions = F.normalize(truth.double(), dim=1)
    if int((torch.linalg.svdvals(directions) > _DEPENDENT).sum()) < count:
        return Unavailable(
            "the true features are linearly dependent, so they span fewer directions"
        )
    claimed = F.normalize(reconstruction[:count].double(), dim=1)
    degrees = torch.full((count,), 90.0, dtype=torch.float64)
    if claimed.any():
        angles = torch.from_numpy(subspace_angles(directions.T.numpy(), claimed.T.numpy()))
        degrees[: len(angles)] = torch.rad2deg(angles).flip(0)
    return degrees
