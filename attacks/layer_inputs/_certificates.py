"""Certificates of batches whose inputs were all found: that features and labels are right."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.types import Observation, Reconstruction
from fedsim_attacks.classifier_features._certificates import beyond_chance, declared
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient

_ROUNDING = 8.0
"""Times the rounding of what each image adds to the classifier's gradient, that certified features
may leave of it: they come from inputs, through the rest of the network in float32."""


def certified(observation: Observation, answer: Reconstruction) -> Tensor:
    """Returns of which images (N,) an answer is known to be right: of all, or of none.

    Inputs that are determined have zeros that are no coincidence, which leaves nothing of them
    open. Features are computed from them and fitted to nothing; that they explain the classifier's
    gradient to rounding, each with the error signal that it implies itself, are so many equations
    that hold. The gradient has to be declared the client's own, but for factors of clipping.
    """
    classifier = ClassifierGradient.of(observation)
    assert answer.determined is not None
    assert answer.features is not None
    columns = classifier.gradient.shape[1]
    whole = classifier.with_constant(answer.features.double())
    shares = torch.linalg.pinv(whole.T) @ classifier.gradient.T
    # Images that cancel each other leave of the gradient less than its entries were rounded by.
    terms = float((shares.norm(dim=1) * whole.norm(dim=1)).sum() / classifier.gradient.norm())
    sure = (
        declared(classifier)
        and bool(answer.determined.all())
        and answer.loss <= (_ROUNDING * classifier.rounding * terms) ** 2
        and beyond_chance(classifier, columns, classifier.factors, answer.loss)
    )
    return torch.full_like(answer.determined, sure)
