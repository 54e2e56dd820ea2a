"""How certain features are that reproduce a classifier's gradient: which images are determined."""

from __future__ import annotations

from torch import Tensor

from fedsim_attacks.classifier_features._consistency import Consistency, Fits
from fedsim_attacks.classifier_features._profile import Profile

_ROUNDED = (4 * 2.0**-24) ** 2
"""Share of the gradient that rounding of float32 may leave: that of logits and probabilities is
alike in all entries of a row, and no column's sum shows it."""
_SCATTER = 12.0
"""Times the inverse root of the number of equations: how far the energy of what the deviation
leaves may be above its mean, which a column's sums tell with an error of their own."""
_FARTHEST = 1e3
"""Times the bound of an image, that another whose features are open may do to it: farther, it has
no error signal with which it could."""
_SAFETY = 3.0
"""Times the standard deviation of an image's features, up to which they may be off."""


def allowed(problem: Consistency | Profile) -> float:
    """Returns the share of the gradient that noise or rounding may leave."""
    classifier = problem.classifier
    energy = float(classifier.gradient.square().sum())
    mean = problem.freedom * classifier.deviation**2 / energy
    share: float = (1 + _SCATTER / float(problem.freedom) ** 0.5) * mean + _ROUNDED
    return share


def explained(problem: Consistency | Profile, loss: float) -> bool:
    """Says whether a share `loss` of the gradient is no more than noise or rounding leaves."""
    return loss <= allowed(problem)


def relative_errors(problem: Consistency | Profile, fits: Fits, index: int) -> Tensor:
    """Bounds the relative error of each image's features (N,) by the gradient's own deviation,
    or by what the fit leaves, if that is more. An image whose error signal has vanished has no
    bound. Bounds are of first order (`beyond_first_order`).

    Args:
        problem: that was fitted.
        fits: of several starts.
        index: which of them.
    """
    classifier = problem.classifier
    variances = problem.variances(fits.points[index], fits.labels[index])
    left = float(fits.losses[index]) * float(classifier.gradient.square().sum())
    deviation = max(classifier.deviation, (left / problem.freedom) ** 0.5)
    uncertain = variances.sqrt() / fits.features[index].norm(dim=1)
    bounds: Tensor = _SAFETY * deviation * uncertain
    return bounds


def beyond_first_order(bounds: Tensor) -> Tensor:
    """Widens the bounds (N,) of a batch's images where those of first order do not hold.

    Where an image may be off by more than itself, other features and labels explain the gradient as
    well, and every image may be off by as much more.
    """
    return bounds * bounds.max().nan_to_num(_FARTHEST).clamp(1.0, _FARTHEST)
