"""Ways out of a local minimum in which one feature stands for two images.

Images of one label have nearly the same column of D. Where a fit has given two of them one feature
(of about twice the size), another is left over: it is half of a third image's, or corrects the
first, with a column of D that no image can have. So one feature is taken away where that costs
least, and the one that then bends most is split in two (the merge and split moves of Ueda, Nakano,
Ghahramani and Hinton, SMEM Algorithm for Mixture Models, Neural Computation 2000).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features.spectral_features import eigenvectors

_ALIKE = 0.8
"""Cosine of two columns of D from which two features may be halves of one."""
_NEAR = 0.3
"""Share of neurons, those nearest to their threshold, that show whether one feature stands for
two."""
_TRIED = 2
"""Features that are tried to split, those that bend most."""
_DENSE = 32
"""Dimensions from which a single eigenvector is found faster than all."""
_STEPS = 10
"""For that one: the axis of a split need not be exact."""
_ANGLES = (0.15, 0.3, 0.5)
"""By which the halves of a feature are set apart, in units of it."""


def moves(objective: Objective, features: Tensor) -> Iterator[Tensor]:
    """Yields features (n, d) with one removed and another one split, likeliest first."""
    for rest in _reduced(objective, features):
        bends = sorted(_bends(objective, rest), key=lambda bend: bend[0], reverse=True)
        candidates = [
            candidate
            for _, index, axis in bends[:_TRIED]
            for candidate in _halves(rest, index, axis)
        ]
        yield min(candidates, key=lambda candidate: float(objective(candidate).loss))


def _reduced(objective: Objective, features: Tensor) -> list[Tensor]:
    """Lists (n - 1, d) without one of the features, or with the mean of two; least loss first."""
    n = len(features)
    errors = objective(features).errors
    size = torch.linalg.vector_norm(errors, dim=0)
    unit = F.normalize(errors, dim=0)
    alike = unit.T @ unit
    options = [torch.cat([features[:k], features[k + 1 :]]) for k in range(n)]
    for i in range(n):
        for k in range(i):
            if alike[i, k] > _ALIKE:
                mean = (size[i] * features[i] + size[k] * features[k]) / (size[i] + size[k])
                others = [index for index in range(n) if index not in (i, k)]
                options.append(torch.cat([features[others], mean[None]]))
    return sorted(options, key=lambda option: float(objective(option).loss))


def _bends(objective: Objective, features: Tensor) -> Iterator[tuple[float, int, Tensor]]:
    """Yields how much the residual bends at each feature, its index, and the direction (d,).

    σ(w'(x + δ)) + σ(w'(x - δ)) - 2 σ(w'x) is largest where w'x is near 0 and w'δ is not.
    """
    head, value = objective.head, objective(features)
    weights, residual = head.hidden[head.planted], value.residual[:, head.planted]
    for index, feature in enumerate(features):
        bend = F.normalize(value.errors[:, index], dim=0) @ residual
        distance = (weights @ feature).abs()
        near = distance < distance.quantile(_NEAR)
        spread = weights[near].T @ (bend[near, None] * weights[near])
        unit = F.normalize(feature, dim=0)
        across = torch.eye(len(unit)).to(unit) - torch.outer(unit, unit)
        strength, axis = _largest(across @ spread @ across)
        yield strength, index, axis


def _largest(matrix: Tensor) -> tuple[float, Tensor]:
    """Approximates the largest eigenvalue of a symmetric matrix, and its vector (d,)."""
    if len(matrix) < _DENSE:
        values, vectors = eigenvectors(matrix)
        return float(values[-1]), vectors[:, -1]
    start = torch.ones(len(matrix), 1).to(matrix)
    values, vectors = torch.lobpcg(matrix, X=start, largest=True, niter=_STEPS)
    return float(values[0]), vectors[:, 0]


def _halves(features: Tensor, index: int, axis: Tensor) -> Iterator[Tensor]:
    """Yields (n + 1, d) with feature `index` split along `axis`."""
    feature = features[index]
    others = torch.cat([features[:index], features[index + 1 :]])
    for angle in _ANGLES:
        step = angle * torch.linalg.vector_norm(feature) * axis
        yield torch.cat([others, (feature + step)[None], (feature - step)[None]])
