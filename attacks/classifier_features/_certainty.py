"""How certain features are that reproduce a classifier's gradient: which images are determined."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jacfwd

from fedsim_attacks.classifier_features._consistency import Consistency, Fits

_ROUNDED = (4 * 2.0**-24) ** 2
"""Share of the gradient that rounding of float32 may leave: that of logits and probabilities is
alike in all entries of a row, and no column's sum shows it."""
_EXPLAINED = 4.0
"""Times the energy of the deviation, up to which what is left of the gradient is no more than
that."""
_SAFETY = 3.0
"""Times the standard deviation of an image's features, up to which they may be off."""


def explained(problem: Consistency, loss: float) -> bool:
    """Says whether a share `loss` of the gradient is no more than noise or rounding leaves."""
    classifier = problem.classifier
    energy = float(classifier.gradient.square().sum())
    expected = len(classifier.weights) * classifier.num_images * classifier.deviation**2
    return loss * energy <= _EXPLAINED * expected + _ROUNDED * energy


def relative_errors(problem: Consistency, fits: Fits, index: int) -> Tensor:
    """Bounds the relative error of each image's features (N,) by the gradient's own deviation,
    or by what the fit leaves, if that is more.

    A fit amplifies the deviation by its Jacobian's inverse inside the row space, and by the error
    signals' outside, where all of the gradient's columns have it. An image whose error signal has
    vanished has no bound.

    Args:
        problem: that was fitted.
        fits: of several starts.
        index: which of them.
    """
    classifier = problem.classifier
    point, labels = fits.points[index], fits.labels[index]
    if not bool(fits.features[index].isfinite().all()):
        return point.new_full((classifier.num_images,), torch.inf)
    targets = torch.nn.functional.one_hot(labels, problem.classes).double()
    variances = torch.zeros_like(point)
    if len(point):
        jacobian = jacfwd(problem.residual)(point, targets)
        variances = _inverse_squares(jacobian.T)
    variances = variances[: len(variances) - classifier.factors]
    inside = variances.reshape(classifier.num_images, -1).sum(1)
    errors = problem.errors(point, labels) / classifier.num_images
    columns = classifier.gradient.shape[1]
    outside = columns * _inverse_squares(errors)
    left = float(fits.losses[index]) * float(classifier.gradient.square().sum())
    spare = max(1, len(classifier.weights) * classifier.num_images - len(point))
    deviation = max(classifier.deviation, (left / spare) ** 0.5)
    uncertain: Tensor = (inside + outside).sqrt() / fits.features[index].norm(dim=1)
    bounds: Tensor = _SAFETY * deviation * uncertain
    return bounds


def _inverse_squares(vectors: Tensor) -> Tensor:
    """Sums the squares of each row of the pseudo-inverse of `vectors` (n, e) transposed: (n,).

    Nothing is cut off: of vectors that depend on each other it is as large as it comes out, and not
    as small as if the direction in which they do not differ had been seen.
    """
    directions, lengths, _ = torch.linalg.svd(vectors, full_matrices=False)
    least = torch.finfo(lengths.dtype).eps * lengths.amax()
    floor = least.clamp_min(torch.finfo(lengths.dtype).tiny)
    found: Tensor = (directions / lengths.clamp_min(floor)).square().sum(1)
    return found
