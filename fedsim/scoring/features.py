"""Metrics of recovered features: the inputs of the model's head, (N, d), in matched order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring.outcome import ScoringError, Unavailable


def check_features(features: Tensor, what: str) -> None:
    """Refuse what is not a batch of features.

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
    """Cosine between each pair, (N,) in [-1, 1]; 0 where either is zero."""
    return F.cosine_similarity(reconstruction.double(), truth.double(), dim=1, eps=1e-30)


def feature_error(reconstruction: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """||r - t|| / ||t|| of each pair, (N,): 0 is exact, 1 is what guessing zero achieves."""
    norm = torch.linalg.vector_norm(truth.double(), dim=1)
    if not bool(norm.all()):
        return Unavailable("a true feature vector is zero, so there is no relative error")
    error = torch.linalg.vector_norm(reconstruction.double() - truth.double(), dim=1)
    relative: Tensor = error / norm
    return relative
