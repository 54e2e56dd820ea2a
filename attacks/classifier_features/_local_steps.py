"""Features over several local steps, whose weights lead from those sent to those that come back.

A server knows both ends of that path, body and all. To first order the mean gradient over the steps
is one gradient at the path's middle, and `classifier_fit` fits that one. What is left is of second
order. It is computed from the fit and taken off the gradient, which is fitted again, and so on
(deferred correction; Fox, 1947): the classifier's steps are simulated, with features that drift as
the body moves. How features drift there is seen on images of noise, and hardly depends on the
image: a linear map of its features tells most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.models.local import features_of, mean_gradient_factor, step_weights
from fedsim.models.victim import rebuild
from fedsim.types import LocalTraining, Observation
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Fits, Profile

_DECAY = 0.75  # factor of the gradient from step to step, assumed until the steps are known


def as_one_gradient(observation: Observation, share: float = 0.0) -> Observation:
    """Turns an update of several steps into one gradient, a `share` in [0, 1] along its path.

    The result's parameters are the sent ones plus that share of the update, its update is the
    steps' mean gradient, and its training is one step of FedSGD.
    """
    factor, effect = mean_gradient_factor(observation.training), observation.effect
    # Limits of entries and of the length are in units of the update.
    cut, bound = (None if x is None else x * abs(factor) for x in (effect.truncated, effect.bound))
    return replace(
        observation,
        effect=replace(effect, truncated=cut, bound=bound),
        parameters={
            name: value + share * observation.update[name] if share else value
            for name, value in observation.parameters.items()
        },
        update={name: value * factor for name, value in observation.update.items()},
        training=replace(
            observation.training,
            algorithm="fedsgd",
            batch_size=observation.training.num_images,
            steps=1,
        ),
    )


def _positions(training: LocalTraining, sizes: Sequence[float]) -> list[float]:
    """Computes which share of the update, in [0, 1], was made before each step of these sizes."""
    # Sizes are those of the steps' gradients along the update, positive downhill, in any unit.
    found, position, velocity = [], 0.0, 0.0
    for size in sizes:
        found.append(position)
        # PyTorch's momentum: v ← μ v + g, w ← w - lr v.
        velocity = training.momentum * velocity + size
        position += velocity
    return [each / position for each in found]


def _middle(training: LocalTraining, shares: Sequence[float]) -> float:
    """Computes the share of the update at which a gradient is the steps' mean."""
    # Where gradients change linearly along the path, their mean is that at the mean position.
    weights = step_weights(training)
    return sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(weights)


_IMAGES = 256  # images of noise whose features are watched as they drift
_BRIGHTNESS = 0.5  # standard deviation of the brightness of these images, over that of their pixels
_TRIED = 128  # further images of noise, on which the predicted drift is tested
_PARTS = slice(_IMAGES), slice(_IMAGES, None)
_RIDGE = 1e-2  # ridge of the drift's regression, over the mean square of a feature


def _natural_noise(shape: torch.Size, rng: torch.Generator) -> Tensor:
    """Draws images of `shape` (N, C, H, W) with a natural spectrum: amplitudes fall as 1/f."""
    spectrum = torch.fft.rfft2(torch.randn(shape, generator=rng))
    frequency = torch.hypot(
        torch.fft.fftfreq(shape[-2])[:, None], torch.fft.rfftfreq(shape[-1])[None]
    )
    frequency[0, 0] = 1.0
    # Photographs have amplitudes of about 1/f (Field, 1987), which white noise has not.
    images = torch.fft.irfft2(spectrum / frequency, s=tuple(shape[-2:]))
    images = images - images.mean((1, 2, 3), keepdim=True)
    images = images / images.std((1, 2, 3), keepdim=True)
    brightness = _BRIGHTNESS * torch.randn(shape[0], 1, 1, 1, generator=rng)
    return torch.add(images, brightness)


@final
class _Drift:
    """The change of features along the path: quadratic in the share, linear in the features."""

    def __init__(self, observation: Observation, middle: float, rng: torch.Generator) -> None:
        """Watches features of noise at both ends of the path and at its `middle`, in (0, 1)."""
        shape = torch.Size((_IMAGES + _TRIED, *observation.model.input_shape))
        images = _natural_noise(shape, rng).to(observation.device)
        whole = [_features(observation, share, images) for share in (0.0, 1.0)]
        ends, others = ([each[part] for each in whole] for part in _PARTS)
        self.features, tried = (_features(observation, middle, images)[part] for part in _PARTS)
        """Features (P, d) of the images of noise, at the middle."""
        self._middle = middle
        mean_square = self.features.square().sum(1).mean()
        # A constant as large as features, so that the ridge treats offset and features alike.
        self._unit = mean_square.clamp_min(torch.finfo(mean_square.dtype).tiny).sqrt()
        inputs = self._with_unit(self.features)
        normal = inputs.T @ inputs / len(inputs)
        ridge = _RIDGE * self._unit**2 / inputs.shape[1]
        normal = normal + ridge * torch.eye(len(normal)).to(normal)
        start, end = (
            torch.linalg.solve(normal, inputs.T @ (each - self.features) / len(inputs))
            for each in ends
        )
        # Of a (s - m) + b (s - m)², both ends tell a and b.
        self._curved = end / (1 - middle) + start / middle
        self._straight = self._curved * middle - start / middle
        # The fit's own noise says nothing of its worth: images held back do.
        missed = [self(tried, share) - end for share, end in zip((0.0, 1.0), others, strict=True)]
        spread = (tried - tried.mean(0)).norm()
        self.unexplained = float(torch.stack(missed).norm(dim=(1, 2)).max() / spread)
        """Error of the drift of other noise, over how far features are apart."""

    def __call__(self, features: Tensor, share: float) -> Tensor:
        """Moves `features` (N, d) from the middle to where a `share` of the update is made."""
        away = share - self._middle
        moved: Tensor = self._with_unit(features) @ (away * (self._straight + away * self._curved))
        return features + moved

    def _with_unit(self, features: Tensor) -> Tensor:
        return torch.cat([features, self._unit.expand(len(features), 1)], 1)


def _features(observation: Observation, share: float, images: Tensor) -> Tensor:
    moved = as_one_gradient(observation, share)
    model, training = rebuild(moved), moved.training
    return features_of(model, moved.parameters, moved.buffers, images, training).double()


_MIDDLE_ERROR = 0.02  # relative error of an entry where the steps are taken for one
_ERRORS = (0.01, 0.005, 0.003, 0.003)
"""The same after each correction; the last ones are what the model of the drift leaves."""
_FOLLOWED = 0.25
"""Largest unexplained drift of a path that is followed: 0.05 to 0.14 where that helps, and 0.4 to
1.2 in fresh networks."""
_ITERATIONS = 60  # iterations of the fit after each correction


@final
class LocalPath:
    """Follows one client's local steps on one batch, and corrects the fit along their path."""

    def __init__(self, observation: Observation, rng: torch.Generator) -> None:
        """Reads the steps of an update that `suits` as one gradient, and watches features drift."""
        self._training = observation.training
        sizes = [_DECAY**step for step in range(self._training.steps)]
        self._shares = _positions(self._training, sizes)
        share = _middle(self._training, self._shares)
        self.observation = as_one_gradient(observation, share)
        """One gradient, at the middle."""
        self._classifier = ClassifierGradient.read(self.observation)
        self._sent = ClassifierGradient.read(as_one_gradient(observation)).weights
        # The middle lies a `share` along the path: extrapolated it gives the classifier of the end.
        self._came = self._sent + (self._classifier.weights - self._sent) / share
        self.drift = _Drift(observation, share, rng)

    @staticmethod
    def suits(observation: Observation, classifier: ClassifierGradient) -> bool:
        """Says whether a `LocalPath` can be made of an update, of which `classifier` is a part."""
        # It has to be of one client, exact, not clipped, and of several steps on the same batch.
        # Under a frozen body features stay, and `Consistency` follows the classifier by itself.
        body = len(observation.parameters) > 1 + int(classifier.biased)
        exact = classifier.exact and not classifier.factors
        return bool(classifier.rates) and observation.num_clients == 1 and body and exact

    @property
    def is_told(self) -> bool:
        """Whether a linear map predicts the features' drift well enough for corrections."""
        return self.drift.unexplained <= _FOLLOWED

    @property
    def classifier(self) -> ClassifierGradient:
        """The classifier's gradient at the path's middle, marked as an approximation."""
        return replace(self._classifier, approximation=_MIDDLE_ERROR)

    def follow(self, features: Tensor, labels: Tensor) -> tuple[Profile, Fits]:
        """Corrects the gradient and fits it again, from `features` (N, d) at the middle."""
        # Deferred correction (Fox, 1947): each is computed from a better fit than the last.
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
            fit = problem.narrow(fit, _ITERATIONS)
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
            # Weights move against the gradient: its size along the path is positive downhill.
            sizes.append(-float((gradient * path).sum()))
            total = total + entering * gradient
            velocity = training.momentum * velocity + gradient
            weights = weights - training.lr * velocity
        if min(sizes) > 0:  # or it is no path that a next correction may follow
            self._shares = _positions(training, sizes)
        one = self._gradient(self._classifier.weights, features, targets)
        return total / sum(step_weights(training)) - one

    def _gradient(self, weights: Tensor, features: Tensor, targets: Tensor) -> Tensor:
        features = self._classifier.with_constant(features)
        errors = (features @ weights.T).softmax(1) - targets
        return errors.T @ features / len(features)
