"""Certificates: of which images an attacker knows that features and labels are right.

A solution is certified where it reproduces the whole gradient to rounding, where its features are
locally unique (`bound_errors`), and where no other solution does so well. Two things speak for
the last. Each equation beyond the unknowns is one more coincidence that a wrong one would need.
And rivals are sought: from each label changed for another, from features longer and shorter, and
from features of images of noise. What an image has in all rivals that explain as much is certified.

A certificate is as good as what is declared of the client. Of a defense that does not say what it
does, of noise and of entries removed, rounded or mixed there is none.

Diana et al. (No More Guessing, arXiv:2604.15063, 2026) and Shariati and Meybodi (Cascading Gradient
Inversion via LT-Code Inspired Peeling, manuscript, 2026) certify inputs of a first dense layer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Consistency, Fits, Profile

_ROUNDED = (4 * 2.0**-24) ** 2
"""Share of the gradient that rounding may leave, alike in all entries of a row: no sum shows it."""
_SCATTER = 12.0  # relative excess of noise's energy, times the root of the equations' number
_FARTHEST = 1e3  # largest factor by which an image whose features are open widens others' bounds
_SAFETY = 3.0  # standard deviations by which an image's features may be off


def bound_residual(problem: Consistency | Profile) -> float:
    """Returns the share of the gradient's squared norm that noise or rounding may leave."""
    classifier = problem.classifier
    energy = float(classifier.gradient.square().sum())
    # A fit leaves noise in as many entries as there are equations beyond its unknowns.
    mean = problem.freedom * classifier.deviation**2 / energy
    share: float = (1 + _SCATTER / float(problem.freedom) ** 0.5) * mean + _ROUNDED
    return share


def is_explained(problem: Consistency | Profile, loss: float) -> bool:
    """Says whether noise or rounding may leave the share `loss` of the gradient's energy."""
    return loss <= bound_residual(problem)


def bound_errors(problem: Consistency | Profile, fits: Fits, index: int) -> Tensor:
    """Bounds the relative error of each image's features (N,), of start `index` of `fits`."""
    # Bounds are three standard deviations of noise, or of what the fit leaves; infinite for an
    # image with no error signal. They are of first order: `widen_bounds` corrects large ones.
    classifier = problem.classifier
    try:
        variances = problem.variances(fits.points[index], fits.labels[index])
    except torch.linalg.LinAlgError:
        # A fit that ran away to where its slopes overflow says nothing of its features.
        return fits.features[index].new_full((classifier.num_images,), torch.inf)
    left = float(fits.losses[index]) * float(classifier.gradient.square().sum())
    # What the fit leaves may be more than noise: then it is no estimate of noise, but a bound.
    deviation = max(classifier.deviation, (left / problem.freedom) ** 0.5)
    uncertain = variances.sqrt() / fits.features[index].norm(dim=1)
    bounds: Tensor = _SAFETY * deviation * uncertain
    return bounds


def widen_bounds(bounds: Tensor) -> Tensor:
    """Widens the first-order bounds (N,) of a batch's relative errors where they do not hold."""
    # An image whose bound exceeds 1 may be wrong altogether, and with it all others.
    return bounds * bounds.max().nan_to_num(_FARTHEST).clamp(1.0, _FARTHEST)


_ROUNDING = 4.0  # root mean square residual of an entry that a solution may leave, over rounding
_RIGHT = 0.03  # relative error of features (a cosine of 0.9995) up to which they are right
_WRONG = 0.03  # root of the share of the gradient that features of wrong labels usually leave
_NATS = 10.0  # log-odds against coincidence that equations left over must have: a chance of 5e-5
_CHANGES = 36  # labels that are changed at most, one at a time, the likeliest first
_WORK = 3e8  # budget for changed labels, each of which costs the cube of the number of unknowns
_LENGTHS = (0.1, 0.3, 3.0, 10.0)  # factors of the features' lengths at which rivals start
_ITERATIONS = 20  # iterations of a rival's descent
_PROMISING = 1e4  # loss over the tolerance up to which a rival is descended further
_FURTHER = 120  # iterations of a promising rival's second descent
_AS_GOOD = 100.0  # loss over the tolerance up to which a rival explains the gradient too


def certify_images(
    classifier: ClassifierGradient, features: Tensor, labels: Tensor, others: Tensor
) -> Tensor:
    """Returns a boolean mask (N,) of the images whose answers are known to be right.

    Features are then right up to a relative error of 3 %, and labels exactly.

    Args:
        classifier: the observed gradient.
        features: the answer's features (N, d).
        labels: the answer's labels (N,).
        others: features (S, N, d) from which rivals that explain the gradient, too, are sought.
    """
    none = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    if not is_declared(classifier) or not bool(features.isfinite().all()):
        return none
    problem = Consistency(classifier)
    # The answer may be of another fit of the same gradient: the nearest solution here is judged.
    fit = problem.descend(problem.unknowns(features[None]), labels[None], _ITERATIONS)
    # The whole gradient counts, although only its strongest directions are fitted.
    loss, unknowns = float(fit.losses[0]), fit.points.shape[1]
    is_reproduced = loss + problem.outside <= tolerance(classifier)
    if not (bool(fit.features.isfinite().all()) and is_reproduced):
        return none
    if not exceeds_chance(classifier, classifier.num_images, unknowns, loss):
        return none
    moved = (fit.features[0] - features).norm(dim=1)
    sure = widen_bounds(bound_errors(problem, fit, 0)) < _RIGHT
    # A certificate is for what was answered, not for what this descent has made of it.
    sure &= (moved <= _RIGHT * features.norm(dim=1)) & _stand_apart(fit)
    if bool(sure.any()):
        sure &= _are_in_all_rivals(problem, fit, _seek_rivals(problem, fit, others))
    return sure


def is_declared(classifier: ClassifierGradient) -> bool:
    """Says whether the gradient is declared to be what the client computed, up to clipping."""
    return classifier.exact and not classifier.dropout and not classifier.approximation


def tolerance(classifier: ClassifierGradient) -> float:
    return (_ROUNDING * classifier.rounding) ** 2


def exceeds_chance(
    classifier: ClassifierGradient, columns: int, unknowns: int, loss: float
) -> bool:
    """Returns whether too many equations hold to be a coincidence, whatever the labels are.

    Args:
        classifier: the observed gradient.
        columns: independent equations of each of the gradient's rows.
        unknowns: number of unknowns of the fit.
        loss: share of the gradient's squared norm that the fit leaves, in [0, 1].
    """
    # An equation counts by how far its row's share exceeds the loss: nearly any features meet a
    # small row.
    classes, images = len(classifier.weights), classifier.num_images
    left = max(math.sqrt(loss), classifier.rounding)
    rows = classifier.gradient.norm(dim=1).sort(descending=True)[0]
    # Rows sum to 0, so that the largest follows from the others and proves nothing.
    rows = rows[1:] / rows.square().sum().sqrt()
    # Log-odds of each equation: how improbable it is that a wrong answer meets it so well.
    each = (_WRONG * rows.square() / left).clamp_min(1.0).log().repeat_interleave(columns)
    # The search could choose among K^N labellings: a union bound over them costs N ln K nats.
    return float(each[unknowns:].sum()) >= images * math.log(classes) + _NATS


def _stand_apart(fit: Fits) -> Tensor:
    """Returns a mask (N,) of the images that have no other of the same label near them."""
    features, labels = fit.features[0], fit.labels[0]
    near = torch.cdist(features, features) <= _RIGHT * features.norm(dim=1, keepdim=True)
    twins = near & (labels[:, None] == labels)
    # Every image is near itself, so that 1 means no other.
    alone: Tensor = twins.sum(1) == 1
    return alone


def _seek_rivals(problem: Consistency, fit: Fits, others: Tensor) -> Fits:
    """Descends from other labels, lengths and features than the solution's, to find rivals."""
    point, labels = fit.points[0], fit.labels[0]
    changed = _change_labels(problem, fit)
    scaled = torch.stack([length * fit.features[0] for length in _LENGTHS])
    elsewhere = problem.unknowns(torch.cat([scaled, others.to(scaled.dtype)]))
    starts = torch.cat([point.expand(len(changed), -1), elsewhere])
    answers = torch.cat([changed, labels.expand(len(elsewhere), -1)])
    rivals = problem.descend(starts, answers, _ITERATIONS)
    # A rival above both bounds is far from any solution; one between them may still arrive.
    enough, near = (times * tolerance(problem.classifier) for times in (_AS_GOOD, _PROMISING))
    promising = (rivals.losses > enough) & (rivals.losses <= near)
    if bool(promising.any()):
        further = problem.descend(rivals.points[promising], answers[promising], _FURTHER)
        for kept, more in zip(rivals, further, strict=True):
            kept[promising] = more
    return rivals


def _change_labels(problem: Consistency, fit: Fits) -> Tensor:
    """Returns the labels (R, N) in which one image has another class, the likeliest first."""
    labels = fit.labels[0]
    held = F.one_hot(labels, problem.classes)
    scale = problem.scale(fit.points[0])
    # p - 2 y: the class that the model takes an image for, beside its label, comes first.
    likely = problem.errors(fit.points[0], labels) / scale - held
    # A descent solves systems of as many unknowns, at the cost of their cube.
    affordable = int(_WORK / max(1, fit.points.shape[1]) ** 3)
    count = min(max(1, affordable), _CHANGES, held.numel() - len(labels))
    places = likely.flatten().topk(count).indices
    changed = labels.repeat(count, 1)
    changed[torch.arange(count), places // problem.classes] = places % problem.classes
    return changed


def _are_in_all_rivals(problem: Consistency, fit: Fits, rivals: Fits) -> Tensor:
    """Returns a mask (N,) of the images that are also in each rival which explains the gradient."""
    features, labels = fit.features[0], fit.labels[0]
    held = torch.ones(len(labels), dtype=torch.bool)
    good = rivals.losses <= _AS_GOOD * tolerance(problem.classifier)
    for other, theirs in zip(rivals.features[good], rivals.labels[good], strict=True):
        near = torch.cdist(features, other) <= _RIGHT * features.norm(dim=1, keepdim=True)
        held &= (near & (labels[:, None] == theirs)).any(1)
    return held
