"""Entries that pruning has removed from a classifier's gradient, filled in by what features imply.

Entries that are left are exact, and of one that is missing it is known that it was smaller than the
smallest that is left. Both steps in turn, features of the completed gradient and entries of the
features, never raise what is left of the entries that were seen.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsim_attacks.classifier_features._consistency import Fits
from fedsim_attacks.classifier_features._profile import Profile

_TURNS = 200
"""Times that the missing entries are filled in."""
_STEPS = 2
"""Iterations of the fit after each."""
_STRIDE = 1.8
"""How far entries move, over what the features imply: a little beyond it converges sooner."""
_STILL = 1e-9
"""Share of the gradient's norm below which a change of the missing entries is none."""


def complete(problem: Profile, fits: Fits) -> tuple[Profile, Fits]:
    """Fills in the missing entries of `problem`, from `fits` of one start.

    Returns:
        The problem with the completed gradient, and the fit of that.
    """
    classifier = problem.classifier
    missing, bound = ~classifier.kept, classifier.removed_below
    if bound is None:
        bound = torch.full_like(classifier.gradient[0], torch.inf)
    size = float(classifier.gradient.norm())
    for _ in range(_TURNS):
        implied = problem.implied(fits.points, fits.labels)[0]
        before = problem.classifier.gradient
        moved = (before + _STRIDE * (implied - before)).clamp(min=-bound, max=bound)
        gradient = torch.where(missing, moved, before)
        problem = Profile(replace(classifier, gradient=gradient))
        fits = problem.descend(fits.points, fits.labels, _STEPS)
        if float((gradient - before).norm()) < _STILL * size:
            break
    return problem, fits
