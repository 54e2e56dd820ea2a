"""Features that reproduce a classifier's gradient, in the coordinates of its row space.

The rows of ∂L/∂W span the features of the batch as long as there are more classes than images. In
an orthonormal basis of that span, N features are N² unknowns; the error signals follow from them
and the labels, and with them the gradient: (K - 1) N equations. With a bias, all features have a
last entry of 1, which takes N unknowns away. Factors of clipping are
unknown too.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._levenberg_marquardt import Minima, minimize

_CHUNK = 1 << 26
"""Entries of the Jacobians that are held at once (512 MiB)."""


class Fits(NamedTuple):
    """Features that several starts have led to."""

    features: Tensor
    """(S, N, d), without the constant 1."""
    labels: Tensor
    """(S, N) int64."""
    losses: Tensor
    """(S,): squared residual over the squared gradient."""
    points: Tensor
    """(S, n): the unknowns."""


@final
class Consistency:
    """The residual of a classifier's gradient as a function of features in its row space."""

    def __init__(self, classifier: ClassifierGradient) -> None:
        """Finds the row space: the N strongest right singular directions of the gradient."""
        self.classifier = classifier
        count = classifier.num_images
        directions = torch.linalg.svd(classifier.gradient, full_matrices=False)[2][:count]
        self._basis = directions
        self._observed = classifier.gradient @ directions.T
        self._energy = classifier.gradient.square().sum()
        missed = classifier.gradient - self._observed @ directions
        self.outside = float(missed.square().sum() / self._energy)
        """Share of the gradient outside the row space."""
        self._weights = classifier.weights @ directions.T
        self._origin = directions.new_zeros(count)
        self._free = torch.eye(count, dtype=directions.dtype)
        if classifier.biased:
            constant = directions[:, -1]
            self._origin = constant / constant.square().sum()
            self._free = torch.linalg.svd(constant[None])[2][1:].T

    @property
    def classes(self) -> int:
        """K."""
        return len(self.classifier.weights)

    def unknowns(self, features: Tensor) -> Tensor:
        """Projects `features` (S, N, d) to unknowns (S, n) of the row space."""
        features = features.double()
        if self.classifier.biased:
            features = F.pad(features, (0, 1), value=1.0)
        inside = (features @ self._basis.T - self._origin) @ self._free
        return F.pad(inside.flatten(1), (0, self.classifier.factors))

    def features(self, points: Tensor) -> Tensor:
        """Turns unknowns (S, n) into features (S, N, d)."""
        whole: Tensor = self._coordinates(points) @ self._basis
        return whole[..., :-1] if self.classifier.biased else whole

    def descend(self, points: Tensor, labels: Tensor, iterations: int) -> Fits:
        """Descends from `points` (S, n), each with its `labels` (S, N)."""
        targets = F.one_hot(labels, self.classes).double()
        jacobian = self._observed.numel() * max(1, points.shape[1])
        size = max(1, _CHUNK // (3 * jacobian))
        slopes = None if self.classifier.rates else self.slopes
        found = [
            minimize(self.residual, *part, iterations, slopes)
            for part in zip(torch.split(points, size), torch.split(targets, size), strict=True)
        ]
        minima = Minima(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        losses = minima.losses / self._energy
        return Fits(self.features(minima.points), labels, losses, minima.points)

    def residual(self, point: Tensor, targets: Tensor) -> Tensor:
        """Computes what `point` (n,) with one-hot labels (N, K) leaves of the gradient (K N,)."""
        coordinates, scale, weights = self._coordinates(point), self.scale(point), self._weights
        velocity = total = torch.zeros_like(weights)
        entered = momentum = 0.0
        for rate in (*self.classifier.rates, 0.0):
            errors = scale * ((coordinates @ weights.T).softmax(-1) - targets)
            velocity = self.classifier.momentum * velocity + errors.T @ coordinates
            momentum = self.classifier.momentum * momentum + 1
            total, entered = total + velocity, entered + momentum
            weights = weights - rate / len(coordinates) * velocity
        mean = total / (entered * len(coordinates))
        left: Tensor = (mean - self._observed).flatten()
        return left

    def slopes(self, points: Tensor, targets: Tensor) -> Tensor:
        """Computes the Jacobians (S, K N, n) of the residuals of one step at `points` (S, n).

        With coordinates c_i of N images, the residual is (1/N) Σ_i s_i (p_i - y_i) c_i'.
        """
        starts, images = len(points), self.classifier.num_images
        coordinates, scale = self._coordinates(points), self.scale(points)
        probabilities = (coordinates @ self._weights.T).softmax(-1)
        errors = scale * (probabilities - targets) / images
        along = self._weights @ self._free
        turned = along - (probabilities @ along)[..., None, :]
        turned = (scale / images * probabilities)[..., None] * turned
        found = torch.einsum("sikf,sia->skaif", turned, coordinates)
        found += torch.einsum("sik,af->skaif", errors, self._free)
        whole = found.reshape(starts, self._observed.numel(), images * self._free.shape[1])
        if self.classifier.factors:
            own = torch.einsum("sik,sia->skai", errors, coordinates).flatten(1, 2)
            whole = torch.cat([whole, own.sum(2, True) if scale.shape[1] == 1 else own], 2)
        return whole

    def errors(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the error signals (N, K) of the first step at `point` (n,), as released."""
        logits = self._coordinates(point) @ self._weights.T
        errors: Tensor = self.scale(point) * (logits.softmax(-1) - F.one_hot(labels, self.classes))
        return errors

    def scale(self, point: Tensor) -> Tensor:
        """Returns the factors of images' error signals (..., N, 1) or, if they have one, (..., 1, 1)."""
        factors = self.classifier.factors
        return point[..., -factors:].exp()[..., None] if factors else point.new_ones(1, 1)

    def _coordinates(self, points: Tensor) -> Tensor:
        count = self.classifier.num_images
        flat = points[..., : points.shape[-1] - self.classifier.factors]
        free = flat.reshape(*flat.shape[:-1], count, self._free.shape[1])
        coordinates: Tensor = self._origin + free @ self._free.T
        return coordinates
