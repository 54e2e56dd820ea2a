"""How well features of images explain the gradient of an ordinary classifier."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim_attacks.classifier_features import _certificates
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient, implied
from fedsim_attacks.classifier_features._profile import Consistency, Fits

_ITERATIONS = 120
"""Of a descent from features of images."""
_APART = 0.5
"""Of the distance to the nearest other features, up to which an image's may be off."""


def explained(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether `features` (N, d) explain the gradient but for noise and rounding."""
    problem = Consistency(classifier)
    return _certificates.explained(problem, float(_at(problem, features, 0).losses[0]))


def doubts(classifier: ClassifierGradient, features: Tensor) -> Tensor:
    """Squares the bounds (N,) of the relative errors of `features` (N, d), 0 beyond its classes."""
    if classifier.excess:
        return features.new_zeros(len(features))
    problem = Consistency(classifier)
    bounds = _certificates.relative_errors(problem, _at(problem, features, 0), 0)
    return bounds.square().nan_to_num(1)


def determined(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether noise leaves each image's features nearer to the truth than to another's.

    Of more images than the classifier can tell apart, another layer has told them (`_heads`), and
    only those that it determines.
    """
    if classifier.exact or classifier.excess:
        return True
    problem = Consistency(classifier)
    fit = _at(problem, features, 0)
    errors = _certificates.relative_errors(problem, fit, 0) * features.norm(dim=1)
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
