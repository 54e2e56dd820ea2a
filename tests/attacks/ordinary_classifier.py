"""Gradients of ordinary classifiers, and the search for what they are of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.types import Effect, Reconstruction
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Consistency, Profile
from fedsim_attacks.classifier_features.classifier_fit import ClassifierSolver


def softmax_gradient(features: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """∂L/∂W (K, d) of the mean cross-entropy of `features` (N, d)."""
    errors = (features @ weights.T).softmax(1) - F.one_hot(labels, len(weights))
    return errors.T @ features / len(features)


def classifier_gradient(
    weights: Tensor,
    gradient: Tensor,
    count: int,
    *,
    biased: bool = False,
    effect: Effect | None = None,
) -> ClassifierGradient:
    """What is observed of `count` images, undefended unless an `effect` is told."""
    effect = effect or Effect()
    return ClassifierGradient(
        weights=weights.double(),
        gradient=gradient.double(),
        biased=biased,
        num_images=count,
        factors=count if effect.scaled_examples else int(effect.scaled),
        removed=effect.removed is not None,
        mixed=effect.mixed,
        noisy=effect.noisy,
        exact=effect.exact,
        dropout=False,
        rates=(),
        momentum=0.0,
        rounding=torch.finfo(gradient.dtype).eps / 2 if gradient.dtype.itemsize < 8 else 2.0**-24,
    )


def search(
    problem: Profile | Consistency,
    pool: Tensor,
    labels: Tensor,
    stream: torch.Generator,
    *,
    starts: int,
    exchanges: int,
) -> Reconstruction:
    """The answer of `classifier_fit` to a problem, from `labels` and features of a `pool` on."""
    solver = ClassifierSolver(
        loss=torch.full((), torch.inf),
        problem=problem,
        pool=pool,
        rng=stream,
        starts=starts,
        iterations=60,
        labels=labels,
        exchanges=exchanges,
    )
    while not solver.finished:
        solver.improve()
    return solver.reconstruction()
