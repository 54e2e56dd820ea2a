"""Features of candidate images, fitted from there to what the head's gradient shows.

Where noise, pruning or rounding blurs the head's gradient, a fit of features alone ends in local
minima: images of one label have nearly the same error signal, and what belongs to which of them is
hard to tell. Images that reproduce the whole update roughly know it: natural images do not mix.
Their features, a tenth off, lie where the fit goes down to the answer.

How well features of images explain the gradient of an ordinary classifier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from fedsim_attacks.classifier_features import _certificates
from fedsim_attacks.classifier_features._classifier_gradient import (
    ClassifierGradient,
    derive_signals,
)
from fedsim_attacks.classifier_features._profile import Consistency, Fits
from fedsim_attacks.head_features import _joint_fit, head_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient, Objective, residual_over_noise
from fedsim_attacks.images_from_features._heads import Head

_CLASSIFIER_ITERATIONS = 120
"""Iterations of a descent from features of images."""
_APART = 0.5
"""Share of the distance to the nearest other features up to which an image's may be off."""


def _is_explained_by(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether `features` (N, d) explain the gradient but for noise and rounding."""
    problem = Consistency(classifier)
    return _certificates.is_explained(problem, float(_at(problem, features, 0).losses[0]))


def _doubts_of(classifier: ClassifierGradient, features: Tensor) -> Tensor:
    """Squares the bounds (N,) of relative errors of `features` (N, d); 0 for too many images."""
    if classifier.excess:
        return features.new_zeros(len(features))
    problem = Consistency(classifier)
    bounds = _certificates.bound_errors(problem, _at(problem, features, 0), 0)
    return bounds.square().nan_to_num(1)


def _is_determined_by(classifier: ClassifierGradient, features: Tensor) -> bool:
    """Says whether noise leaves each image's features nearer to the truth than to another's.

    With more images than the classifier can tell apart, features come from another layer
    (`_heads`), which gives only those that it determines.
    """
    if classifier.exact or classifier.excess:
        return True
    problem = Consistency(classifier)
    fit = _at(problem, features, 0)
    errors = _certificates.bound_errors(problem, fit, 0) * features.norm(dim=1)
    # An error of less than half the way to another image's features cannot confuse them.
    apart = torch.cdist(features, features).fill_diagonal_(torch.inf).amin(1)
    return bool((errors < _APART * apart).all())


def _fit_classifier(
    classifier: ClassifierGradient, features: Tensor, other: Tensor
) -> Tensor | None:
    """Descends from images' `features` (N, d); returns `other` if that explains more.

    None where `features` explain the gradient already.
    """
    if _is_explained_by(classifier, features):
        return None
    problem = Consistency(classifier)
    refit = _at(problem, features, _CLASSIFIER_ITERATIONS)
    if float(refit.losses[0]) <= float(_at(problem, other, 0).losses[0]):
        return refit.features[0].to(features.dtype)
    return other


def _at(problem: Consistency, features: Tensor, iterations: int) -> Fits:
    labels = derive_signals(problem.classifier, features)[0]
    return problem.descend(problem.unknowns(features[None]), labels[None], iterations)


_ITERATIONS = 1500
"""Iterations of the fit behind pruning and rounding; it mostly ends earlier."""
_ALL = 1e-5
"""Share of ∂L/∂A that features may leave where there is no noise."""
EXCHANGED = 0.1
"""Share of their difference that two features which are hard to tell apart may have exchanged."""
_CHANCE = 4.0
"""Gain over that which as many unknowns have by fitting noise alone, up to which it is chance."""


def are_explained(head: Head, features: Tensor) -> bool:
    """Says whether `features` (N, d) explain the head's gradient up to its noise."""
    features = features.cpu()
    if isinstance(head, ClassifierGradient):
        return _is_explained_by(head, features)
    most = 1 + _CHANCE * _explained_by_chance(head, features) if head.noise else _ALL
    return _misfit(head, features) < most


def are_determined(head: Head, features: Tensor, exchanged: float = EXCHANGED) -> bool:
    """Says whether the head's gradient determines the `features` (N, d).

    Two of them are moved towards each other or apart, by the share `exchanged` of their difference.
    A single one is made longer or shorter by that share. The features are determined if every such
    change explains the gradient clearly worse. Behind an ordinary classifier, bounds on their
    errors decide, and `exchanged` is not used. A gradient that is `exact` always determines them.
    """
    features = features.cpu()
    if isinstance(head, ClassifierGradient):
        return _is_determined_by(head, features)
    if head.exact:
        return True
    misfit = _misfit(head, features)
    # The features of two images that nearly mix are the easiest to confuse.
    gap = min(_misfit(head, other) for other in _alternatives(features, exchanged)) - misfit
    if not head.noise:
        return gap > misfit
    return gap > max(misfit - 1, _CHANCE * _explained_by_chance(head, features))


def doubts(head: Head, features: Tensor) -> Tensor:
    """Estimates the squared sine, (N,) in [0, 1], by which each of the `features` (N, d) is off.

    Behind a two-layer head it is the share of ∂L/∂A that they leave unexplained beyond noise, the
    same for all images, and 0 under dropout. Behind an ordinary classifier it is the square of each
    image's bound on the relative error, and 0 for more images than it can tell apart.
    """
    on_processor = features.cpu()
    if isinstance(head, ClassifierGradient):
        found = _doubts_of(head, on_processor)
    elif head.dropout:
        found = torch.zeros(len(features))
    else:
        objective = Objective(head)
        left = float(objective(on_processor).loss) - objective.noise_floor(head.noise)
        found = torch.full((len(features),), left)
    return found.clamp(0, 1).to(features)


def refit_features(head: Head, features: Tensor, other: Tensor) -> Tensor | None:
    """Fits the head's gradient from images' `features` (N, d).

    Returns the fit or, if they explain more, the features `other` (N, d), in the images' order.
    Returns None where `features` explain the gradient up to its noise, which a fit would fit.
    """
    found = _fit(head, features.cpu(), other.cpu())
    return None if found is None else found.to(features.device)


def _fit(head: Head, features: Tensor, other: Tensor) -> Tensor | None:
    if isinstance(head, ClassifierGradient):
        return _fit_classifier(head, features, other)
    if head.noisy:
        refit = _joint_fit.fit_whole_gradient(head, features)
    else:
        refit = head_fit.fit_output(head, features, _ITERATIONS)
    before, after = _misfit(head, features), _misfit(head, refit)
    # As many unknowns explain some of the noise in any case: such a gain says nothing.
    if head.noise and before - after < _CHANCE * _explained_by_chance(head, features):
        return None
    return refit if after <= _misfit(head, other) else _permute(other, features)


def _alternatives(features: Tensor, exchanged: float) -> Iterator[Tensor]:
    """Yields features (N, d) that are hard to distinguish from `features`."""
    for i, j in itertools.combinations(range(len(features)), 2):
        for by in (-exchanged, exchanged):
            other = features.clone()
            away = by * (features[i] - features[j])
            other[i] += away
            other[j] -= away
            yield other
    if len(features) == 1:
        # A single image has none to be confused with but itself at another length.
        yield from ((1 - exchanged) * features, (1 + exchanged) * features)


def _misfit(head: HeadGradient, features: Tensor) -> float:
    """Computes the mean squared residual over the noise's variance, or over the gradient's."""
    if head.noisy:
        return residual_over_noise(head, features)
    value = Objective(head)(features)
    return float(value.residual.square().mean()) / head.noise if head.noise else float(value.loss)


def _explained_by_chance(head: HeadGradient, features: Tensor) -> float:
    """Computes the part of the noise's mean square that a fit of so many features explains."""
    parts = [head.grad_output]
    if head.noisy:
        parts += [head.grad_hidden, head.grad_bias]
    return features.numel() / sum(part.numel() for part in parts)


def _permute(refit: Tensor, reference: Tensor) -> Tensor:
    """Permutes `refit` (N, d) so that each row is nearest to that of `reference` in its place."""
    from scipy.optimize import linear_sum_assignment  # which takes half a second

    _, nearest = linear_sum_assignment(torch.cdist(reference, refit).numpy())
    return refit[torch.from_numpy(nearest)]
