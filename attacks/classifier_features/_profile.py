"""Features that reproduce a classifier's gradient, with all that is linear in them eliminated.

Only the part of a feature in the span of the classifier's rows decides its logits, and with them
its error signals D. Given D, the rest Y of the features is linear in the gradient: D'Y / N = M.
So the unknowns are N points of a space of K dimensions at most, and the rest is what explains M
best (variable projection; Golub and Pereyra, 1973; slopes after Kaufman, 1975). Nothing of the
gradient is left out, as a cut to its strongest directions does: noise hides weak ones from a cut
long before it hides them from the fit, whose errors are those that the noise allows.

Many starts are fitted at once by Levenberg's and Marquardt's method (1944, 1963). Entries that
pruning removed are filled in by what the features imply (`complete_gradient`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jacfwd, vmap

from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient

_FIRST_DAMPING = 1e-2  # damping at the start, in units of the diagonal of J'J
_EASED, _RAISED = 0.2, 3.0
"""Factors of the damping after a step that lowered the sum of squares, and after any other."""
_DAMPING = (1e-12, 1e8)  # least and largest damping
_FLAT = 1e-12  # entry of the diagonal, over the largest, below which no residual changes

_Batched = Callable[[Tensor, Tensor], Tensor]
"""Function from points (S, n) and constants to residuals (S, e), or to Jacobians (S, e, n)."""
_Normals = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from points (S, n), constants and residuals (S, e) to J'J (S, n, n) and J'r (S, n)."""


def _make_normals(jacobians: _Batched) -> _Normals:
    """Returns a function that computes J'J and J'r from the Jacobians J of `jacobians`."""

    def normals(points: Tensor, given: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        slopes = jacobians(points, given).transpose(1, 2)
        return slopes @ slopes.transpose(1, 2), (slopes @ left[..., None])[..., 0]

    return normals


def _minimize(
    residuals: _Batched,
    normals: _Normals,
    starts: Tensor,
    given: Tensor,
    iterations: int,
    enough: float,
) -> tuple[Tensor, Tensor]:
    """Minimizes |residuals|² from S starts, until one is below `enough`; returns points, losses."""
    points = starts
    damping = starts.new_full((len(starts),), _FIRST_DAMPING)
    there = residuals(points, given)
    losses = there.square().sum(1)
    # A single image with a bias has no unknowns: its row space and the constant fix it.
    if not starts.shape[1]:
        return points, losses
    moved = True
    for _ in range(iterations):
        # Damping at its bound everywhere means that no start can be lowered any more.
        if bool((losses < enough).any()) or bool((damping >= _DAMPING[1]).all()):
            break
        if moved:  # else only the damping is another
            normal, downhill = normals(points, given, there)
            diagonal = normal.diagonal(dim1=1, dim2=2)
            # A direction that changes no residual has curvature 0: the system would be singular.
            floor = _FLAT * diagonal.amax(1, keepdim=True) + torch.finfo(starts.dtype).tiny
        # Marquardt's scaling: damped in units of each unknown's own curvature.
        damped = normal + torch.diag_embed(damping[:, None] * (diagonal + floor))
        # `solve_ex` raises for no start: one singular system would end the descent of all.
        step, broken = torch.linalg.solve_ex(damped, downhill)
        tried = points - step
        left = residuals(tried, given)
        reached = left.square().sum(1)
        # A NaN compares as not less, so that a step that overflows is refused like one that climbs.
        better = (reached < losses) & (broken == 0)
        moved = bool(better.any())
        points = torch.where(better[:, None], tried, points)
        there = torch.where(better[:, None], left, there)
        losses = torch.where(better, reached, losses)
        damping = torch.where(better, _EASED * damping, _RAISED * damping).clamp(*_DAMPING)
    return points, losses


_CHUNK = 1 << 24  # entries of the Jacobians that are held at once (128 MiB)
_NOTHING = 1e-100  # least singular value, so that squares of its inverse are finite

# The first forward derivative has torch load a module in which it uses torch.jit.script itself.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)


class Fits(NamedTuple):
    """Holds features that descents from several starts have reached."""

    features: Tensor  # (S, N, d), without the constant 1
    labels: Tensor  # (S, N) int64
    losses: Tensor  # (S,): squared residual over the squared gradient
    points: Tensor  # (S, n): the unknowns


def _whole_inverse(matrix: Tensor) -> Tensor:
    """Computes the pseudo-inverse (N, K) of `matrix` (K, N), without a cut of small values."""
    # An image without an error signal has a huge inverse, which shows that it is undetermined.
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    inverse: Tensor = (right.T / lengths.clamp_min(_NOTHING)) @ left.T
    return inverse


@final
class Consistency:
    """Computes what features in the row space of a classifier's gradient leave of it."""

    def __init__(self, classifier: ClassifierGradient) -> None:
        """Finds the row space: the N strongest right singular directions of the gradient."""
        self.classifier = classifier
        count = classifier.num_images
        # ∂L/∂W = D'X / N has rank N at most, and its row space is that of the features X.
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
            # Features end with 1: the row space's points with that last entry are an affine
            # subspace.
            constant = directions[:, -1]
            self._origin = constant / constant.square().sum()
            # The other right singular vectors of a single row span all that is orthogonal to it.
            self._free = torch.linalg.svd(constant[None])[2][1:].T

    @property
    def classes(self) -> int:
        return len(self.classifier.weights)

    def unknowns(self, features: Tensor) -> Tensor:
        """Projects `features` (S, N, d) to row-space coordinates and log factors, (S, n)."""
        features = self.classifier.with_constant(features.double())
        inside = (features @ self._basis.T - self._origin) @ self._free
        # A factor is stored as its logarithm: no step makes it negative, and 0 is no clipping.
        return F.pad(inside.flatten(1), (0, self.classifier.factors))

    def features(self, points: Tensor, labels: Tensor) -> Tensor:
        """Turns unknowns `points` (S, n) into features (S, N, d), whatever the labels are."""
        whole: Tensor = self._coordinates(points) @ self._basis
        return whole[..., :-1] if self.classifier.biased else whole

    def descend(self, points: Tensor, labels: Tensor, iterations: int, enough: float = 0.0) -> Fits:
        """Fits the gradient from all starts together, until one of them is good enough.

        Starts that were not reached by then are missing at the end of the result.

        Args:
            points: starts (S, n), as `unknowns` returns them.
            labels: labels (S, N) of each, which stay.
            iterations: iterations at most.
            enough: share of the gradient's squared norm that is good enough to be left.
        """
        targets = F.one_hot(labels, self.classes).double()
        jacobian = self._observed.numel() * max(1, points.shape[1])
        size = max(1, _CHUNK // (3 * jacobian))
        found: list[tuple[Tensor, Tensor]] = []
        normals: _Normals = self._normals
        # The products in `_normals` hold for one step without factors; else J itself is built.
        if self.classifier.rates or self.classifier.factors:
            normals = _make_normals(vmap(jacfwd(self.residual)))
        share = enough * float(self._energy)
        for part in zip(torch.split(points, size), torch.split(targets, size), strict=True):
            found.append(_minimize(vmap(self.residual), normals, *part, iterations, share))
            if bool((found[-1][1] < share).any()):
                break
        reached, sums = (torch.cat(parts) for parts in zip(*found, strict=True))
        # Chunks after the one that explained enough were not descended.
        labels = labels[: len(sums)]
        losses = sums / self._energy
        return Fits(self.features(reached, labels), labels, losses, reached)

    @property
    def freedom(self) -> int:
        """Number of equations beyond the number of unknowns, at least 1."""
        count = self.classifier.num_images
        unknowns = count * self._free.shape[1] + self.classifier.factors
        return max(1, self.classes * count - unknowns)

    def variances(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the summed variance of each image's features, (N,), at unit noise variance."""
        # A fit amplifies noise by its Jacobian's inverse inside the row space. Outside, where all
        # of the gradient's columns have noise, the error signals' inverse amplifies it.
        targets = F.one_hot(labels, self.classes).double()
        variances = torch.zeros_like(point)
        if len(point):
            jacobian = self._jacobian(point, targets)
            _, lengths, directions = torch.linalg.svd(jacobian, full_matrices=False)
            # J⁺ = V Λ⁻¹ U': the squared norms of its rows are variances at unit noise.
            amplified = directions / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)[:, None]
            variances = amplified.square().sum(0)
        variances = variances[: len(variances) - self.classifier.factors]
        count, columns = self.classifier.num_images, self.classifier.gradient.shape[1]
        # The row space is orthonormal: variances of coordinates are those of features.
        inside = variances.reshape(count, -1).sum(1)
        # Outside the row space X = (D' / N)⁺ M: each column adds the inverse's squared row norm.
        errors = self.errors(point, labels) / count
        total: Tensor = inside + columns * _whole_inverse(errors.T).square().sum(1)
        return total

    def _jacobian(self, point: Tensor, targets: Tensor) -> Tensor:
        """Computes the slopes (e, n) of `residual` at `point` (n,)."""
        if self.classifier.rates:
            slopes: Tensor = jacfwd(self.residual)(point, targets)
            return slopes
        # By hand: forward derivatives import torch's compiler, three seconds in each process.
        coordinates, count = self._coordinates(point), self.classifier.num_images
        shares = (coordinates @ self._weights.T).softmax(-1)
        scale = self.scale(point) / count
        errors, weights = scale * (shares - targets), self._weights @ self._free
        moved = (scale * shares)[..., None] * (weights - (shares @ weights)[:, None])
        slopes = torch.einsum("ikl,ij->kjil", moved, coordinates)
        slopes = (slopes + torch.einsum("ik,jl->kjil", errors, self._free)).flatten(2)
        if factors := self.classifier.factors:
            # Residuals are linear in a factor, and so are their own slopes in its logarithm.
            each = torch.einsum("ik,ij->kji", errors, coordinates)
            slopes = torch.cat([slopes, each if factors > 1 else each.sum(2, keepdim=True)], 2)
        return slopes.flatten(0, 1)

    def _normals(self, points: Tensor, targets: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Computes J'J and J'r at points (S, n) for residuals `left` of one step."""
        # With M_i the slopes of D_i and C the coordinates, J is M_ikl C_ij + D_ik F_jl: products of
        # small matrices, so that J itself, of N K N by N² entries, is never needed.
        count, free = self.classifier.num_images, self._free
        coordinates = self._coordinates(points)
        shares = (coordinates @ self._weights.T).softmax(-1)
        errors = (shares - targets) / count
        weights = self._weights @ free
        mean = shares @ weights
        # Slope of the softmax: ∂p_k/∂x = p_k (w_k - Σ_j p_j w_j).
        moved = shares[..., None] / count * (weights - mean[:, :, None])  # (S, N, K, l)
        flat = moved.transpose(2, 3).flatten(1, 2)  # (S, N l, K)
        own = free.shape[1]
        grams = coordinates @ coordinates.transpose(1, 2)
        shape = (len(points), count, own, count, own)
        # Σ_kj (M_ikl C_ij)(M_pkm C_pj) = (M_i'M_p)_lm (C C')_ip.
        normal = (flat @ flat.transpose(1, 2)).view(shape) * grams[:, :, None, :, None]
        # Cross terms: (M_i'D_p)_l (C_i F)_m, and the transpose.
        crossed = (flat @ errors.transpose(1, 2)).view(shape[:4])
        mixed = crossed[..., None] * (coordinates @ free)[:, :, None, None]
        normal = normal + mixed + mixed.permute(0, 3, 4, 1, 2)
        # F has orthonormal columns: D's own term (D D')_ip stands only where l = m.
        energies = errors @ errors.transpose(1, 2)
        normal.diagonal(dim1=2, dim2=4).add_(energies[..., None])
        rest = left.view(len(points), self.classes, count)
        downhill = torch.einsum("snkl,skn->snl", moved, rest @ coordinates.transpose(1, 2))
        downhill = downhill + errors @ (rest @ free)
        return normal.flatten(3).flatten(1, 2), downhill.flatten(1)

    def residual(self, point: Tensor, targets: Tensor) -> Tensor:
        """Computes implied less observed gradient (K N,), at `point` (n,) and one-hot `targets`."""
        coordinates, scale, weights = self._coordinates(point), self.scale(point), self._weights
        velocity = total = torch.zeros_like(weights)
        entered = momentum = 0.0
        # The last step's gradient counts, but no weights follow it: its rate does not matter.
        for rate in (*self.classifier.rates, 0.0):
            errors = scale * ((coordinates @ weights.T).softmax(-1) - targets)
            velocity = self.classifier.momentum * velocity + errors.T @ coordinates
            momentum = self.classifier.momentum * momentum + 1
            total, entered = total + velocity, entered + momentum
            weights = weights - rate / len(coordinates) * velocity
        # Momentum lets a gradient enter all later steps: divided by how often, the sum is a mean.
        mean = total / (entered * len(coordinates))
        left: Tensor = (mean - self._observed).flatten()
        return left

    def errors(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the first step's error signals (N, K) at `point` (n,), scaled by clipping."""
        logits = self._coordinates(point) @ self._weights.T
        errors: Tensor = self.scale(point) * (logits.softmax(-1) - F.one_hot(labels, self.classes))
        return errors

    def scale(self, point: Tensor) -> Tensor:
        """Returns clipping's factors at `point` (n,): (N, 1), or (1, 1) if images share one."""
        factors = self.classifier.factors
        return point[-factors:].exp()[:, None] if factors else point.new_ones(1, 1)

    def _coordinates(self, points: Tensor) -> Tensor:
        count = self.classifier.num_images
        flat = points[..., : points.shape[-1] - self.classifier.factors]
        free = flat.reshape(*flat.shape[:-1], count, self._free.shape[1])
        coordinates: Tensor = self._origin + free @ self._free.T
        return coordinates


_SHARED = 100.0
"""Variance of what a batch's features share, over that around it: as good as unknown."""
_VANISHED = 1e-13  # eigenvalue of D'D, over the largest, below which one is rounding
_APART = 1e-15  # distance by which equal eigenvalues are moved apart, over the largest
_LARGEST = 50.0  # log of a factor that a step may try: beyond, squares of error signals overflow
NARROWED = 2
"""Times that the features' spread is estimated, and the fit repeated with it."""
_WIDER = 3.0  # factor of the estimated spread; with less, features gain what others lose
_EXPECTATIONS = 30  # rounds of the estimate of how far a batch's features are from what they share


class _Parts(NamedTuple):
    """Parts that explain the gradient's c columns; r dimensions are the classifier's rows' span."""

    errors: Tensor
    slopes: Tensor  # slopes of D in the points (S, N, K, r)
    inputs: Tensor  # (S, N, c): the features' columns: in the span, the constant, the rest
    left: Tensor  # (S, K, c): what is left of the gradient's columns
    outside: Tensor  # (S, K, K): the projector to what no Y explains


@final
class Profile:
    """Computes what features in the span of a classifier's rows leave of its gradient."""

    def __init__(self, classifier: ClassifierGradient, spread: float | None = None) -> None:
        """Divides the gradient's columns into those of the rows' span and the rest, Y.

        `spread` is the standard deviation of an image's Y around what all share; None if not known.
        """
        self.classifier = classifier
        self._ridge = 0.0
        if spread is not None:
            # Ridge (N σ / τ)² of Y ~ N(0, τ²), which enters the gradient as D'Y / N with noise σ.
            self._ridge = (classifier.num_images * classifier.deviation / spread) ** 2
        biased = classifier.biased
        weights = classifier.weights[:, :-1] if biased else classifier.weights
        # Error signals sum to 0: what columns sum to is noise.
        centred = classifier.gradient - classifier.gradient.mean(0)
        gradient = centred[:, :-1] if biased else centred
        # Logits depend on features through the span of W's rows alone.
        self._span, corner = torch.linalg.qr(weights.T)
        self._weights = corner.T
        self._bias = classifier.weights[:, -1] if biased else weights.new_zeros(len(weights))
        inside = gradient @ self._span
        outside = gradient - inside @ self._span.T
        # d - r columns outside the span are K numbers each: turned, K columns say the same.
        turned, lengths, self._turn = torch.linalg.svd(outside, full_matrices=False)
        rest = turned * lengths
        # Least squares weigh equations by their precision, and the bias may be rounded more finely.
        own = centred[:, -1:] * classifier.bias_weight
        self._observed = torch.cat([inside, own, rest] if biased else [inside, rest], 1)
        self._energy = classifier.gradient.square().sum()
        self._last: tuple[Tensor, Tensor, _Parts] | None = None

    @property
    def classes(self) -> int:
        return len(self.classifier.weights)

    @property
    def rank(self) -> int:
        """Number of dimensions r that the classifier's rows span."""
        return int(self._span.shape[1])

    @property
    def freedom(self) -> int:
        count, columns = self.classifier.num_images, self.classifier.gradient.shape[1]
        inside = self.rank + int(self.classifier.biased)
        # Columns sum to 0, so that K - 1 of a column's K entries are equations.
        equations = (self.classes - 1) * inside - count * self.rank - self.classifier.factors
        # A column outside the span has N unknowns of its own, those of Y.
        return max(1, equations + max(0, self.classes - 1 - count) * (columns - inside))

    def variances(self, point: Tensor, labels: Tensor) -> Tensor:
        """Computes the summed variance of each image's features, (N,), at unit noise variance."""
        # They are of first order: the Jacobian gives that of the points, and with the inverse of
        # the error signals that of Y, the part outside the span of the classifier's rows.
        targets = F.one_hot(labels, self.classes).double()[None]
        parts = self._parts(point[None], targets)
        count, factors = self.classifier.num_images, self.classifier.factors
        jacobian = self._jacobians(point[None], targets)[0]
        _, lengths, axes = torch.linalg.svd(jacobian, full_matrices=False)
        spread = axes.T / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
        inside = spread[: len(spread) - factors].square().reshape(count, -1).sum(1)
        errors = parts.errors[0]
        inverse = count * _whole_inverse(errors.T)
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
        """Estimates the standard deviation of an entry of Y, at `point` (n,) and `labels` (N,)."""
        # By expectation and maximization, at the error signals that point and labels imply.
        errors = self.errors(point, labels) / len(labels)
        count, noise = len(labels), self.classifier.deviation**2
        columns = self.classifier.gradient.shape[1] - self.rank - int(self.classifier.biased)
        rest = self._observed[:, self._observed.shape[1] - len(self._turn) :]
        # Covariance of the images' Y over the variance: a part of each, and one that all share.
        shared = torch.eye(count, dtype=errors.dtype) + _SHARED
        inverse = torch.linalg.inv(shared)
        solved = torch.linalg.lstsq(errors.T, rest).solution
        variance = float(solved.square().sum(1).min()) / columns
        for _ in range(_EXPECTATIONS):
            # Expectation: Y given the gradient is normal, of gain V D (D'V D + σ² I)⁻¹.
            seen = shared @ errors
            whole = variance * errors.T @ seen
            normal = whole + noise * torch.eye(len(whole), dtype=whole.dtype)
            read, broken = torch.linalg.solve_ex(normal, seen.T)
            if bool(broken):
                # Sums may show no noise at all, and D'V D alone is singular.
                read = torch.linalg.pinv(normal, hermitian=True) @ seen.T
            gain = variance * read
            found = gain.T @ rest
            open_ = variance * (shared - gain.T @ errors.T @ shared)
            # Maximization: the variance at which so large a second moment is likeliest.
            second = found @ found.T + columns * open_
            variance = float((inverse * second).sum()) / (count * columns)
        return float(variance**0.5)

    def unknowns(self, features: Tensor) -> Tensor:
        inside = features.double() @ self._span
        unknowns: Tensor = F.pad(inside.flatten(1), (0, self.classifier.factors))
        return unknowns

    def features(self, points: Tensor, labels: Tensor) -> Tensor:
        """Turns unknowns `points` (S, n) with labels (S, N) into features (S, N, d)."""
        parts = self._parts(points, F.one_hot(labels, self.classes).double())
        rest = parts.inputs[..., parts.inputs.shape[2] - self._turn.shape[0] :] @ self._turn
        inside: Tensor = parts.inputs[..., : self.rank] @ self._span.T
        whole: Tensor = inside + rest
        return whole

    def _compute_gradient(self, points: Tensor, labels: Tensor) -> Tensor:
        """Computes the gradient (S, K, d + 1) of `points` (S, n); d columns without a bias."""
        errors = self._parts(points, F.one_hot(labels, self.classes).double()).errors
        features = self.classifier.with_constant(self.features(points, labels))
        gradient: Tensor = errors.transpose(1, 2) @ features / self.classifier.num_images
        return gradient

    def descend(self, points: Tensor, labels: Tensor, iterations: int, enough: float = 0.0) -> Fits:
        """Fits the gradient from all starts together, and returns what each of them has reached.

        Args:
            points: starts (S, n), as `unknowns` returns them.
            labels: labels (S, N) of each, which stay.
            iterations: iterations at most.
            enough: share of the gradient's squared norm; descents end once one start leaves less.
        """
        targets = F.one_hot(labels, self.classes).double()
        jacobian = self._observed.numel() * max(1, points.shape[1])
        size = max(1, _CHUNK // jacobian)
        normals = _make_normals(self._jacobians)
        found = [
            _minimize(self._residuals, normals, *part, iterations, enough * float(self._energy))
            for part in zip(torch.split(points, size), torch.split(targets, size), strict=True)
        ]
        reached, sums = (torch.cat(parts) for parts in zip(*found, strict=True))
        losses = sums / self._energy
        return Fits(self.features(reached, labels), labels, losses, reached)

    def narrow(self, fit: Fits, iterations: int) -> Fits:
        """Fits again from `fit` with a normal prior on Y, if any, which noise would spread."""
        if self.classifier.gradient.shape[1] <= self.rank + int(self.classifier.biased):
            return fit
        for _ in range(NARROWED):
            spread = _WIDER * self.spread(fit.points[0], fit.labels[0])
            if not 0 < spread < math.inf:  # features that are all alike tell nothing of it
                break
            fit = Profile(self.classifier, spread).descend(fit.points, fit.labels, iterations)
        return fit

    def _residuals(self, points: Tensor, targets: Tensor) -> Tensor:
        """Computes implied less observed gradient (S, e), at the best Y, of one-hot `targets`."""
        return self._parts(points, targets).left.flatten(1)

    def _jacobians(self, points: Tensor, targets: Tensor) -> Tensor:
        """Computes the slopes (S, e, n) of `_residuals`, without the change of Y with D."""
        parts = self._parts(points, targets)
        count, rank = self.classifier.num_images, self.rank
        fixed = self._observed.shape[1] - len(self._turn)
        slopes = parts.slopes / count
        known = torch.einsum("snkl,snj->skjnl", slopes, parts.inputs[..., :fixed])
        # ∂(D'A)/∂A beside ∂D/∂A: each column of the span has a point's own entry.
        known[:, :, range(rank), :, range(rank)] += parts.errors.transpose(1, 2) / count
        # Kaufman, 1975: of the projected columns' slopes only the projector times ∂D' Y is kept.
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
        """Computes error signals (N, K) at `point` (n,) with `labels` (N,), scaled by clipping."""
        return self._parts(point[None], F.one_hot(labels, self.classes).double()[None]).errors[0]

    def _parts(self, points: Tensor, targets: Tensor) -> _Parts:
        last = self._last
        # A descent asks for slopes where it has just asked for residuals.
        if last is None or last[1] is not targets or not torch.equal(last[0], points):
            last = self._last = points, targets, self._compute_parts(points, targets)
        return last[2]

    def _compute_parts(self, points: Tensor, targets: Tensor) -> _Parts:
        count, factors = self.classifier.num_images, self.classifier.factors
        inside = points[:, : points.shape[1] - factors].reshape(len(points), count, self.rank)
        scale = points.new_ones(1, 1, 1)
        if factors:
            scale = points[:, -factors:].clamp(max=_LARGEST).exp()[..., None]
        shares = (inside @ self._weights.T + self._bias).softmax(-1)
        # A tried step may overflow, and a NaN in one start would make `eigh` raise for all.
        errors = (scale * (shares - targets)).nan_to_num(0.0, 0.0, 0.0)
        mean = shares @ self._weights
        slopes = scale[..., None] * shares[..., None] * (self._weights - mean[:, :, None])
        known = errors
        if self._ridge:
            # V D, where V = 1 + `_SHARED` 11' is the prior covariance of the images' Y.
            known = errors + _SHARED * errors.sum(1, keepdim=True)
        # Ridge of Y by eigenvalues of D'V D: one factorization serves all columns.
        energies, axes = _eigen(errors.transpose(1, 2) @ known)
        energies = torch.where(energies > _VANISHED * energies[:, -1:], energies, 0)
        ridged = energies + self._ridge
        inverse = torch.where(ridged > 0, 1 / ridged, 0)
        # Residual and penalty make |√(1 - e / (e + ridge)) M|²; without a ridge, a projector.
        part = (1 - energies * inverse).clamp_min(0).sqrt()
        outside = (axes * part[:, None]) @ axes.transpose(1, 2)
        rest = self._observed[:, self._observed.shape[1] - len(self._turn) :]
        solved = (axes * inverse[:, None]) @ (axes.transpose(1, 2) @ rest)
        # Y = N V D (D'V D + ridge)⁻¹ M.
        free = count * (known @ solved)
        fixed = inside
        if self.classifier.biased:
            fixed = F.pad(inside, (0, 1), value=self.classifier.bias_weight)
        explained = errors.transpose(1, 2) @ fixed / count
        left = torch.cat([explained - self._observed[:, : fixed.shape[2]], -(outside @ rest)], 2)
        return _Parts(errors, slopes, torch.cat([fixed, free], 2), left, outside)


def _eigen(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Computes eigenvalues (S, K) and eigenvectors (S, K, K) of symmetric `matrices` (S, K, K)."""
    # Where LAPACK does not converge, like eigenvalues are moved apart by what is rounding.
    try:
        energies, axes = torch.linalg.eigh(matrices)
    except torch.linalg.LinAlgError:
        largest = matrices.diagonal(dim1=1, dim2=2).amax(1)
        apart = torch.linspace(0, _APART, matrices.shape[1], dtype=matrices.dtype)
        moved = torch.diag_embed(largest[:, None] * apart)
        energies, axes = torch.linalg.eigh(matrices + moved)
    return energies, axes


_TURNS = 200  # times that the missing entries are filled in, at most
_STEPS = 2  # iterations of the fit after each filling in
_STRIDE = 1.8  # step of missing entries, over the way to what features imply; 1 converges later
_STILL = 1e-9  # change of missing entries, over the gradient's norm, at which they have converged


def complete_gradient(problem: Profile, fits: Fits) -> tuple[Profile, Fits]:
    """Fills in the gradient's missing entries, which are 0, from `fits` of one start."""
    classifier = problem.classifier
    missing, bound = classifier.gradient == 0, classifier.removed_below
    if bound is None:
        bound = torch.full_like(classifier.gradient[0], torch.inf)
    size = float(classifier.gradient.norm())
    for _ in range(_TURNS):
        implied = problem._compute_gradient(fits.points, fits.labels)[0]
        before = problem.classifier.gradient
        # Pruning removed the smallest entries: none may be filled in beyond what was kept.
        moved = (before + _STRIDE * (implied - before)).clamp(min=-bound, max=bound)
        gradient = torch.where(missing, moved, before)
        problem = Profile(replace(classifier, gradient=gradient))
        fits = problem.descend(fits.points, fits.labels, _STEPS)
        if float((gradient - before).norm()) < _STILL * size:
            break
    return problem, fits
