"""What recovered features tell of their images: labels and error signals."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.models.victim import rebuild
from fedsim.system.device import moved
from fedsim.types import Observation
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient, implied
from fedsim_attacks.head_features._head_gradient import labels_of
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.images_from_features._heads import head_of


class Signals(NamedTuple):
    """What features tell of their images."""

    labels: Tensor
    """(N,) int64."""
    errors: Tensor
    """e_i (N, d): the derivative of the mean loss in the features."""
    scale: Tensor
    """What the client's defense has scaled its update by (0-d): 1, unless it clips."""


def signals(observation: Observation, features: Tensor) -> Signals:
    """Derives labels and error signals from `features` (N, d) with their norms.

    The label is the class in which ∂L/∂A pulls a feature up; the scale, ∂L/∂A's against what
    the head itself computes of them. Under dropout the head computes something else for each image,
    and error signals are read off instead: with ∂L/∂W = S X, e_i = Σ_j s_ji w_j, whatever the
    neurons that were dropped, and scaled as the update is.
    """
    device = features.device
    found = _signals(moved(observation, "cpu"), features.cpu())
    return Signals(*(each.to(device) for each in found))


def _signals(observation: Observation, features: Tensor) -> Signals:
    head = head_of(observation)
    if isinstance(head, ClassifierGradient):
        return Signals(*implied(head, features))
    model = rebuild(observation).eval()
    with torch.no_grad():
        observed = Objective(head)(features).errors
        labels = labels_of(head, features, observed)
    if head.dropout and head.exact and head.steps == 1:
        shares = head.grad_hidden.double() @ torch.linalg.pinv(features.double())  # (m, N)
        errors_read = (shares.T @ head.hidden.double()).to(features.dtype)
        return Signals(labels, errors_read, observed.new_ones(()))
    features = features.detach().requires_grad_()
    logits = model.head(features)
    (errors,) = torch.autograd.grad(F.cross_entropy(logits, labels), features)
    expected = (logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])).T / len(labels)
    scale = (observed * expected).sum() / expected.square().sum()
    return Signals(labels, errors, scale if head.clipped else torch.ones_like(scale))
