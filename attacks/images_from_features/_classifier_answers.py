"""What features of an ordinary classifier tell of their images, and how well they explain it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.classifier_features import _certainty
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._consistency import Consistency, Fits

_ITERATIONS = 120
"""Of a descent from features of images."""
_APART = 0.5
"""Of the distance to the nearest other features, up to which an image's may be off."""


def implied(classifier: ClassifierGradient, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derives labels (N,), error signals (N, d) and the scale of clipping (0-d) from `features`.

    What reproduces the gradient with these features is p - y but for that scale: the label is where
    it lies furthest below p. Where each image has a scale of its own, error signals have it.
    """
    whole = features.double()
    if classifier.biased:
        whole = F.pad(whole, (0, 1), value=1.0)
    read = classifier.num_images * torch.linalg.pinv(whole.T) @ classifier.gradient.T
    probabilities = (whole @ classifier.weights.T).softmax(1)
    labels, scale = read.argmin(1), read.new_ones(1, 1)
    for _ in range(2):
        errors = probabilities - F.one_hot(labels, probabilities.shape[1])
        if classifier.factors:
            over = (0, 1) if classifier.factors == 1 else 1
            along = (read * errors).sum(over, keepdim=True)
            scale = along / errors.square().sum(over, keepdim=True)
        labels = (read / scale - probabilities).argmin(1)
    errors = probabilities - F.one_hot(labels, probabilities.shape[1])
    weights = classifier.weights[:, :-1] if classifier.biased else classifier.weights
    signals = errors @ weights / classifier.num_images
    if classifier.factors > 1:
        signals, scale = scale * signals, read.new_ones(1, 1)
    return labels, signals.to(features.dtype), scale[0, 0].to(features.dtype)


def explained(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether `features` (N, d) explain the gradient but for noise and rounding."""
    problem = Consistency(classifier)
    return _certainty.explained(problem, float(_at(problem, features, 0).losses[0]))


def determined(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether noise leaves each image's features nearer to the truth than to another's."""
    if classifier.exact:
        return True
    problem = Consistency(classifier)
    fit = _at(problem, features, 0)
    errors = _certainty.relative_errors(problem, fit, 0) * features.norm(dim=1)
    apart = torch.cdist(features, features).fill_diagonal_(torch.inf).amin(1)
    return bool((errors < _APART * apart).all())


def fitted(classifier: ClassifierGradient, features: Tensor, other: Tensor) -> Tensor | None:
    """Descends from images' `features` (N, d); returns `other` if that explains more.

    None where `features` explain the gradient already.
    """
    if explained(classifier, features):
        return None
    problem = Consistency(classifier)
    refit = _at(problem, features, _ITERATIONS)
    if float(refit.losses[0]) <= float(_at(problem, other, 0).losses[0]):
        return refit.features[0].to(features.dtype)
    return other


def _at(problem: Consistency, features: Tensor, iterations: int) -> Fits:
    labels = implied(problem.classifier, features)[0]
    return problem.descend(problem.unknowns(features[None]), labels[None], iterations)
