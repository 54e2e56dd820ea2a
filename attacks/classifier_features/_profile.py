"""Features that reproduce a classifier's gradient, with all that is linear in them eliminated.

Only the part of a feature in the span of the classifier's rows decides its logits, and with them
its error signals D. Given D, the rest Y of the features is linear in the gradient: D'Y / N = M.
So the unknowns are N points of a space of K dimensions at most, and the rest is what explains M
best (variable projection; Golub and Pereyra, 1973; slopes after Kaufman, 1975). Nothing of the
gradient is left out, as a cut to its strongest directions does: noise hides weak ones from a cut
long before it hides them from the fit, whose errors are those that the noise allows.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._consistency import Fits, whole_inverse
from fedsim_attacks.classifier_features._levenberg_marquardt import Minima, minimize, normals_of

_CHUNK = 1 << 24
"""Entries of the Jacobians that are held at once (128 MiB)."""
_SHARED = 100.0
"""Variance of what a batch's features share over that around it: large, as good as unknown."""
_VANISHED = 1e-13
"""Of an eigenvalue of D'D, over the largest: what is less is rounding, and explains nothing."""
_APART = 1e-15
"""Of the largest eigenvalue, how far those that are alike are moved apart."""
_LARGEST = 50.0
"""Logarithm of a factor that a step may try: beyond, squares of error signals overflow."""
NARROWED = 2
"""Times that the features' spread is estimated, and the fit repeated with it."""
_WIDER = 3.0
"""Times the estimated spread that is taken: what one gains by less, others lose."""
_EXPECTATIONS = 30
"""Rounds of the estimate of how far a batch's features are from what they share."""


class _Parts(NamedTuple):
    """What the gradient's columns are explained by, for each of S starts."""

    errors: Tensor
    """D (S, N, K)."""
    slopes: Tensor
    """Of D in the points (S, N, K, r)."""
    inputs: Tensor
    """(S, N, c): the features' columns: in the span, the constant, the rest."""
    left: Tensor
    """(S, K, c): what is left of the gradient's columns."""
    outside: Tensor
    """(S, K, K): the projector to what no Y explains."""


@final
class Profile:
    """The residual of a classifier's gradient as a function of features in its rows' span."""

    def __init__(self, classifier: ClassifierGradient, spread: float | None = None) -> None:
        """Divides the gradient's columns into those of the rows' span and the rest.

        Args:
            classifier: whose gradient is explained.
            spread: standard deviation of an image's Y around what all images of a batch share, as
                far as it is known beforehand; None if nothing is.
        """
        self.classifier = classifier
        self._ridge = 0.0
        if spread is not None:
            self._ridge = (classifier.num_images * classifier.deviation / spread) ** 2
        biased = classifier.biased
        weights = classifier.weights[:, :-1] if biased else classifier.weights
        # Error signals sum to 0: what columns sum to is noise.
        centred = classifier.gradient - classifier.gradient.mean(0)
        gradient = centred[:, :-1] if biased else centred
        self._span, corner = torch.linalg.qr(weights.T)
        self._weights = corner.T
        self._bias = classifier.weights[:, -1] if biased else weights.new_zeros(len(weights))
        inside = gradient @ self._span
        outside = gradient - inside @ self._span.T
        turned, lengths, self._turn = torch.linalg.svd(outside, full_matrices=False)
        rest = turned * lengths
        own = centred[:, -1:] * classifier.bias_weight
        self._observed = torch.cat([inside, own, rest] if biased else [inside, rest], 1)
        self._energy = classifier.gradient.square().sum()

    @property
    def classes(self) -> int:
        """K."""
        return len(self.classifier.weights)

    @property
    def rank(self) -> int:
        """r, the dimensions of the classifier's rows."""
        return int(self._span.shape[1])

    @property
    def freedom(self) -> int:
        """How many more equations there are than unknowns."""
        count, columns = self.classifier.num_images, self.classifier.gradient.shape[1]
        inside = self.rank + int(self.classifier.biased)
        equations = (self.classes - 1) * inside - count * self.rank - self.classifier.factors
        return max(1, equations + max(0, self.classes - 1 - count) * (columns - inside))

    def variances(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the variance of each image's features (N,), summed, per unit of noise variance.

        To first order: of the points by the Jacobian, of Y by the points' and by D's inverse.
        """
        targets = F.one_hot(labels, self.classes).double()[None]
        parts = self._parts(point[None], targets)
        count, factors = self.classifier.num_images, self.classifier.factors
        jacobian = self.jacobians(point[None], targets)[0]
        _, lengths, axes = torch.linalg.svd(jacobian, full_matrices=False)
        spread = axes.T / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        inside = spread[: len(spread) - factors].square().reshape(count, -1).sum(1)
        errors = parts.errors[0]
        inverse = count * whole_inverse(errors.T)
        rest = parts.inputs[0, :, parts.inputs.shape[2] - len(self._turn) :]
        moved = torch.einsum("mk,nkl->mnl", inverse, parts.slopes[0] / count)
        # Y of image m moves by Σ_n moved[m, n] · da_n Y_n: its square norm by Y's Gram matrix.
        turned = spread[: len(spread) - factors].reshape(count, self.rank, -1)
        steps = torch.einsum("mnl,nlq->mnq", moved, turned)
        if factors:
            scaled = (inverse @ errors.T / count)[:, :, None] * spread[-factors:]
            steps = steps + scaled
        outside = torch.einsum("mnq,nj,pj,mpq->m", steps, rest, rest, steps)
        columns = self.classifier.gradient.shape[1]
        total: Tensor = inside + outside + columns * inverse.square().sum(1)
        return total

    def spread(self, point: Tensor, labels: Tensor) -> float:
        """Estimates how far Y of an image is from what the batch shares: its standard deviation.

        By expectation and maximization at the error signals of `point` (n,) with `labels` (N,).
        """
        errors = self.errors(point, labels) / len(labels)
        count, noise = len(labels), self.classifier.deviation**2
        columns = self.classifier.gradient.shape[1] - self.rank - int(self.classifier.biased)
        rest = self._observed[:, self._observed.shape[1] - len(self._turn) :]
        shared = torch.eye(count, dtype=errors.dtype) + _SHARED
        inverse = torch.linalg.inv(shared)
        solved = torch.linalg.lstsq(errors.T, rest).solution
        variance = float(solved.square().sum(1).min()) / columns
        for _ in range(_EXPECTATIONS):
            seen = shared @ errors
            whole = variance * errors.T @ seen
            gain = variance * torch.linalg.solve(
                whole + noise * torch.eye(len(whole), dtype=whole.dtype), seen.T
            )
            found = gain.T @ rest
            open_ = variance * (shared - gain.T @ errors.T @ shared)
            second = found @ found.T + columns * open_
            variance = float((inverse * second).sum()) / (count * columns)
        return float(variance**0.5)

    def unknowns(self, features: Tensor) -> Tensor:
        """Projects `features` (S, N, d) to unknowns (S, n)."""
        inside = features.double() @ self._span
        unknowns: Tensor = F.pad(inside.flatten(1), (0, self.classifier.factors))
        return unknowns

    def features(self, points: Tensor, labels: Tensor) -> Tensor:
        """Turns unknowns (S, n) with labels (S, N) into features (S, N, d)."""
        parts = self._parts(points, F.one_hot(labels, self.classes).double())
        rest = parts.inputs[..., parts.inputs.shape[2] - self._turn.shape[0] :] @ self._turn
        inside: Tensor = parts.inputs[..., : self.rank] @ self._span.T
        whole: Tensor = inside + rest
        return whole

    def implied(self, points: Tensor, labels: Tensor) -> Tensor:
        """Computes the gradient (S, K, d + 1) that points (S, n) with labels (S, N) make."""
        errors = self._parts(points, F.one_hot(labels, self.classes).double()).errors
        features = self.features(points, labels)
        if self.classifier.biased:
            features = F.pad(features, (0, 1), value=1.0)
        gradient: Tensor = errors.transpose(1, 2) @ features / self.classifier.num_images
        return gradient

    def descend(self, points: Tensor, labels: Tensor, iterations: int, enough: float = 0.0) -> Fits:
        """Descends from `points` (S, n), each with its `labels` (S, N).

        The first start to leave no more than a share `enough` of the gradient ends it.
        """
        targets = F.one_hot(labels, self.classes).double()
        jacobian = self._observed.numel() * max(1, points.shape[1])
        size = max(1, _CHUNK // jacobian)
        normals = normals_of(self.jacobians)
        found = [
            minimize(self.residuals, normals, *part, iterations, enough * float(self._energy))
            for part in zip(torch.split(points, size), torch.split(targets, size), strict=True)
        ]
        minima = Minima(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        losses = minima.losses / self._energy
        return Fits(self.features(minima.points, labels), labels, losses, minima.points)

    def narrowed(self, fit: Fits, iterations: int) -> Fits:
        """Goes on from a `fit` with what is known beforehand: that features differ only so much.

        Features that are wholly in the span of the classifier's rows have no such rest.
        """
        if self.classifier.gradient.shape[1] <= self.rank + int(self.classifier.biased):
            return fit
        for _ in range(NARROWED):
            spread = _WIDER * self.spread(fit.points[0], fit.labels[0])
            if not 0 < spread < math.inf:  # features that are all alike tell nothing of it
                break
            fit = Profile(self.classifier, spread).descend(fit.points, fit.labels, iterations)
        return fit

    def residuals(self, points: Tensor, targets: Tensor) -> Tensor:
        """Computes what points (S, n) with one-hot labels (S, N, K) leave of the gradient."""
        return self._parts(points, targets).left.flatten(1)

    def jacobians(self, points: Tensor, targets: Tensor) -> Tensor:
        """Computes the slopes (S, e, n) of `residuals`, but for how Y moves with D."""
        parts = self._parts(points, targets)
        count, rank = self.classifier.num_images, self.rank
        fixed = self._observed.shape[1] - len(self._turn)
        slopes = parts.slopes / count
        known = torch.einsum("snkl,snj->skjnl", slopes, parts.inputs[..., :fixed])
        known[:, :, range(rank), :, range(rank)] += parts.errors.transpose(1, 2) / count
        turned = torch.einsum("sqk,snkl->snql", parts.outside, slopes)
        free = torch.einsum("snkl,snj->skjnl", turned, parts.inputs[..., fixed:])
        whole = torch.cat([known, free], 2).flatten(3).flatten(1, 2)
        if not self.classifier.factors:
            return whole
        each = torch.einsum("snk,snj->skjn", parts.errors / count, parts.inputs)
        each[:, :, fixed:] = torch.einsum("sqk,skjn->sqjn", parts.outside, each[:, :, fixed:])
        if self.classifier.factors == 1:
            each = each.sum(3, keepdim=True)
        return torch.cat([whole, each.flatten(1, 2)], 2)

    def errors(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the error signals (N, K) at `point` (n,), as released."""
        return self._parts(point[None], F.one_hot(labels, self.classes).double()[None]).errors[0]

    def _parts(self, points: Tensor, targets: Tensor) -> _Parts:
        count, factors = self.classifier.num_images, self.classifier.factors
        inside = points[:, : points.shape[1] - factors].reshape(len(points), count, self.rank)
        scale = points.new_ones(1, 1, 1)
        if factors:
            scale = points[:, -factors:].clamp(max=_LARGEST).exp()[..., None]
        shares = (inside @ self._weights.T + self._bias).softmax(-1)
        errors = (scale * (shares - targets)).nan_to_num(0.0, 0.0, 0.0)
        mean = shares @ self._weights
        slopes = scale[..., None] * shares[..., None] * (self._weights - mean[:, :, None])
        known = errors
        if self._ridge:
            known = errors + _SHARED * errors.sum(1, keepdim=True)
        energies, axes = _eigen(errors.transpose(1, 2) @ known)
        energies = torch.where(energies > _VANISHED * energies[:, -1:], energies, 0)
        ridged = energies + self._ridge
        inverse = torch.where(ridged > 0, 1 / ridged, 0)
        part = (1 - energies * inverse).clamp_min(0).sqrt()
        outside = (axes * part[:, None]) @ axes.transpose(1, 2)
        rest = self._observed[:, self._observed.shape[1] - len(self._turn) :]
        solved = (axes * inverse[:, None]) @ (axes.transpose(1, 2) @ rest)
        free = count * (known @ solved)
        fixed = inside
        if self.classifier.biased:
            fixed = F.pad(inside, (0, 1), value=self.classifier.bias_weight)
        explained = errors.transpose(1, 2) @ fixed / count
        left = torch.cat([explained - self._observed[:, : fixed.shape[2]], -(outside @ rest)], 2)
        return _Parts(errors, slopes, torch.cat([fixed, free], 2), left, outside)


def _eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues (S, K) and eigenvectors (S, K, K) of symmetric `matrices` (S, K, K).

    Where LAPACK does not converge, eigenvalues that are alike are moved apart by what is rounding.
    """
    try:
        energies, axes = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        largest = matrices.diagonal(dim1=1, dim2=2).amax(1)
        apart = torch.linspace(0, _APART, matrices.shape[1], dtype=matrices.dtype)
        moved = torch.diag_embed(largest[:, None] * apart)
        energies, axes = torch.linalg.eigh(matrices + moved)
    return energies, axes
