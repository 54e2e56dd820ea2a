"""Features that reproduce a classifier's gradient, in the coordinates of its row space.

The rows of ∂L/∂W span the features of the batch as long as there are more classes than images. In
an orthonormal basis of that span, N features are N² unknowns; the error signals follow from them
and the labels, and with them the gradient: (K - 1) N equations. With a bias, all features have a
last entry of 1, which takes N unknowns away. Factors of clipping are
unknown too.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacfwd, vmap

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._levenberg_marquardt import (
    Minima,
    Normals,
    minimize,
    normals_of,
)

_CHUNK = 1 << 24
"""Entries of the Jacobians that are held at once (128 MiB)."""
_NOTHING = 1e-100
"""Least singular value, so that squares of its inverse are finite."""

# The first forward derivative has torch load a module in which it uses torch.jit.script itself.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)


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


def whole_inverse(matrix: Tensor) -> Tensor:
    """Computes the pseudo-inverse (N, K) of `matrix` (K, N), in which nothing counts as zero.

    What an image without error signal may be is then huge, and not left out.
    """
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    inverse: Tensor = (right.T / lengths.clamp_min(_NOTHING)) @ left.T
    return inverse


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

    def features(self, points: Tensor, labels: Tensor) -> Tensor:
        """Turns unknowns (S, n) into features (S, N, d), whatever the labels (S, N)."""
        whole: Tensor = self._coordinates(points) @ self._basis
        return whole[..., :-1] if self.classifier.biased else whole

    def descend(self, points: Tensor, labels: Tensor, iterations: int, enough: float = 0.0) -> Fits:
        """Descends from `points` (S, n), each with its `labels` (S, N).

        The first start to leave no more than a share `enough` of the gradient ends it.
        """
        targets = F.one_hot(labels, self.classes).double()
        jacobian = self._observed.numel() * max(1, points.shape[1])
        size = max(1, _CHUNK // (3 * jacobian))
        found: list[Minima] = []
        normals: Normals = self._normals
        if self.classifier.rates or self.classifier.factors:
            normals = normals_of(vmap(jacfwd(self.residual)))
        share = enough * float(self._energy)
        for part in zip(torch.split(points, size), torch.split(targets, size), strict=True):
            found.append(minimize(vmap(self.residual), normals, *part, iterations, share))
            if bool((found[-1].losses < share).any()):
                break
        minima = Minima(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        labels = labels[: len(minima.losses)]
        losses = minima.losses / self._energy
        return Fits(self.features(minima.points, labels), labels, losses, minima.points)

    @property
    def freedom(self) -> int:
        """How many more equations there are than unknowns."""
        count = self.classifier.num_images
        unknowns = count * self._free.shape[1] + self.classifier.factors
        return max(1, self.classes * count - unknowns)

    def variances(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the variance of each image's features (N,), summed, per unit of noise variance.

        A fit amplifies it by its Jacobian's inverse inside the row space, and by the error signals'
        outside, where all of the gradient's columns have it.
        """
        targets = F.one_hot(labels, self.classes).double()
        variances = torch.zeros_like(point)
        if len(point):
            jacobian = jacfwd(self.residual)(point, targets)
            _, lengths, directions = torch.linalg.svd(jacobian, full_matrices=False)
            amplified = directions / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)[:, None]
            variances = amplified.square().sum(0)
        variances = variances[: len(variances) - self.classifier.factors]
        count, columns = self.classifier.num_images, self.classifier.gradient.shape[1]
        inside = variances.reshape(count, -1).sum(1)
        errors = self.errors(point, labels) / count
        total: Tensor = inside + columns * whole_inverse(errors.T).square().sum(1)
        return total

    def _normals(self, points: Tensor, targets: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """J'J and J'r at points (S, n) whose residuals are `left`, of one step without factors.

        With M_i the slopes of D_i and C the coordinates, J is M_ikl C_ij + D_ik F_jl: products of
        small matrices, so that J itself, of N K N by N² entries, is never needed.
        """
        count, free = self.classifier.num_images, self._free
        coordinates = self._coordinates(points)
        shares = (coordinates @ self._weights.T).softmax(-1)
        errors = (shares - targets) / count
        weights = self._weights @ free
        mean = shares @ weights
        moved = shares[..., None] / count * (weights - mean[:, :, None])  # (S, N, K, l)
        flat = moved.transpose(2, 3).flatten(1, 2)  # (S, N l, K)
        own = free.shape[1]
        grams = coordinates @ coordinates.transpose(1, 2)
        shape = (len(points), count, own, count, own)
        normal = (flat @ flat.transpose(1, 2)).view(shape) * grams[:, :, None, :, None]
        crossed = (flat @ errors.transpose(1, 2)).view(shape[:4])
        mixed = crossed[..., None] * (coordinates @ free)[:, :, None, None]
        normal = normal + mixed + mixed.permute(0, 3, 4, 1, 2)
        energies = errors @ errors.transpose(1, 2)
        normal.diagonal(dim1=2, dim2=4).add_(energies[..., None])
        rest = left.view(len(points), self.classes, count)
        downhill = torch.einsum("snkl,skn->snl", moved, rest @ coordinates.transpose(1, 2))
        downhill = downhill + errors @ (rest @ free)
        return normal.flatten(3).flatten(1, 2), downhill.flatten(1)

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

    def errors(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the error signals (N, K) of the first step at `point` (n,), as released."""
        logits = self._coordinates(point) @ self._weights.T
        errors: Tensor = self.scale(point) * (logits.softmax(-1) - F.one_hot(labels, self.classes))
        return errors

    def scale(self, point: Tensor) -> Tensor:
        """Returns the factors of images' error signals (N, 1) or, if they have one, (1, 1)."""
        factors = self.classifier.factors
        return point[-factors:].exp()[:, None] if factors else point.new_ones(1, 1)

    def _coordinates(self, points: Tensor) -> Tensor:
        count = self.classifier.num_images
        flat = points[..., : points.shape[-1] - self.classifier.factors]
        free = flat.reshape(*flat.shape[:-1], count, self._free.shape[1])
        coordinates: Tensor = self._origin + free @ self._free.T
        return coordinates
