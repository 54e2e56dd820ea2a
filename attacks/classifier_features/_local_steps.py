"""Features over several local steps, whose weights lead from those sent to those that come back.

A server knows both ends of that path, body and all. To first order the mean gradient over the steps
is one gradient at the path's middle, and `classifier_fit` fits that one. What is left is of second
order. It is computed from the fit and taken off the gradient, which is fitted again, and so on
(deferred correction; Fox, 1947): the classifier's steps are simulated, with features that drift as
the body moves. How features drift there is seen on images of noise, and hardly depends on the
image: a linear map of its features tells most of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.models.local import step_weights
from fedsim.types import Observation
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._consistency import Fits
from fedsim_attacks.classifier_features._drift import Drift
from fedsim_attacks.classifier_features._path import as_one_gradient, decaying, middle, positions
from fedsim_attacks.classifier_features._profile import Profile

_MIDDLE_ERROR = 0.02
"""Root mean square error of an entry, over that of all, where the steps are taken for one."""
_ERRORS = (0.01, 0.005, 0.003, 0.003)
"""And after each correction: the last are what the drift of features leaves."""
_FOLLOWED = 0.25
"""Largest unexplained drift of a path that is followed: 0.05 to 0.14 where that helps, and 0.4 to
1.2 in fresh networks, whose features drift farther than they are apart."""
_ITERATIONS = 60
"""Of the fit after each correction."""


@final
class LocalPath:
    """The path of one client's local steps on one batch, and corrections of the fit along it."""

    def __init__(self, observation: Observation, rng: torch.Generator) -> None:
        """Takes the steps for one gradient at the middle, and watches features drift."""
        self._training = observation.training
        self._shares = decaying(self._training)
        share = middle(self._training, self._shares)
        self.observation = as_one_gradient(observation, share)
        """One gradient, at the middle."""
        self._classifier = ClassifierGradient.of(self.observation)
        self._sent = ClassifierGradient.of(as_one_gradient(observation)).weights
        self._came = self._sent + (self._classifier.weights - self._sent) / share
        self.drift = Drift(observation, share, rng)

    @staticmethod
    def suits(observation: Observation, classifier: ClassifierGradient) -> bool:
        """Says whether an update is of one client's exact steps on one batch, and moves a body."""
        body = len(observation.parameters) > 1 + int(classifier.biased)
        exact = classifier.exact and not classifier.factors
        return bool(classifier.rates) and observation.num_clients == 1 and body and exact

    @property
    def is_told(self) -> bool:
        """Whether a linear map tells how features drift, so that corrections mean anything."""
        return self.drift.unexplained <= _FOLLOWED

    @property
    def classifier(self) -> ClassifierGradient:
        """What the middle shows, as far as it is one gradient."""
        return replace(self._classifier, approximation=_MIDDLE_ERROR)

    def followed(self, features: Tensor, labels: Tensor) -> tuple[Profile, Fits]:
        """Corrects and fits again, from `features` (N, d) of `labels` (N,) at the middle."""
        for error in _ERRORS:
            correction = self._correction(features, labels)
            classifier = replace(
                self._classifier,
                gradient=self._classifier.gradient - correction,
                approximation=error,
            )
            problem = Profile(classifier)
            point = problem.unknowns(features[None])
            fit = problem.descend(point, labels[None], _ITERATIONS)
            fit = problem.narrowed(fit, _ITERATIONS)
            features = fit.features[0]
        return problem, fit

    def _correction(self, features: Tensor, labels: Tensor) -> Tensor:
        """Computes the mean gradient over the steps, less that at the middle (K, d + 1)."""
        training, targets = self._training, F.one_hot(labels, len(self._sent)).double()
        weights, path = self._sent, self._came - self._sent
        velocity = torch.zeros_like(weights)
        total, sizes = torch.zeros_like(weights), []
        for share, entering in zip(self._shares, step_weights(training), strict=True):
            gradient = self._gradient(weights, self.drift(features, share), targets)
            sizes.append(-float((gradient * path).sum()))
            total = total + entering * gradient
            velocity = training.momentum * velocity + gradient
            weights = weights - training.lr * velocity
        if min(sizes) > 0:  # or it is no path that a next correction may follow
            self._shares = positions(training, sizes)
        one = self._gradient(self._classifier.weights, features, targets)
        return total / sum(step_weights(training)) - one

    def _gradient(self, weights: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        if self._classifier.biased:
            features = F.pad(features, (0, 1), value=1.0)
        errors = (features @ weights.T).softmax(1) - targets
        return errors.T @ features / len(features)
