"""Features of candidate images, fitted from there to what a two-layer head's gradient shows.

Where noise, pruning or rounding blurs the head's gradient, a fit of features alone ends in local
minima: images of one label have nearly the same error signal, and what belongs to which of them is
hard to tell. Images that reproduce the whole update roughly know it: natural images do not mix.
Their features, a tenth off, lie where the fit goes down to the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedsim_attacks.head_features import _joint_fit, _output_solver
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features._whole_head import unexplained

_ITERATIONS = 1500
"""Of the fit behind pruning and rounding; it mostly ends earlier."""
_ALL = 1e-5
"""Share of ∂L/∂A that features may leave where there is no noise."""
MIXED = 0.1
"""How much of their difference features that are hard to tell apart may have exchanged."""
_CHANCE = 4.0
"""Times what as many numbers fit of noise alone, up to which features tell nothing that others do
not."""


def explained(seen: HeadGradient, features: Tensor) -> bool:
    """Whether `features` (N, d) leave nothing of the head's gradient but noise."""
    most = 1 + _CHANCE * _by_chance(seen, features) if seen.noise else _ALL
    return _left(seen, features) < most


def settled(seen: HeadGradient, features: Tensor, mixed: float = MIXED) -> bool:
    """Whether the head's gradient leaves no doubt about them.

    It tells them from features of which two have exchanged `mixed` of their difference, and by more
    than what they leave unexplained.
    """
    if seen.exact:
        return True
    left = _left(seen, features)
    told = min(_left(seen, other) for other in _alternatives(features, mixed)) - left
    if not seen.noise:
        return told > left
    return told > max(left - 1, _CHANCE * _by_chance(seen, features))


def fitted(seen: HeadGradient, features: Tensor, other: Tensor) -> Tensor | None:
    """What the head's gradient makes of images' `features` (N, d), or of `other` if that is better.

    In the images' order. None where `features` explain it already, but for noise: fitted ones would
    be noise.
    """
    if seen.noisy:
        found = _joint_fit.descended(seen, features)
    else:
        found = _output_solver.descended(seen, features, _ITERATIONS)
    before, after = _left(seen, features), _left(seen, found)
    if seen.noise and before - after < _CHANCE * _by_chance(seen, features):
        return None
    return found if after <= _left(seen, other) else _in_order(other, features)


def _alternatives(features: Tensor, mixed: float) -> Iterator[Tensor]:
    """Features (N, d) that are hard to tell from `features`."""
    for i, j in itertools.combinations(range(len(features)), 2):
        for by in (-mixed, mixed):
            other = features.clone()
            away = by * (features[i] - features[j])
            other[i] += away
            other[j] -= away
            yield other
    if len(features) == 1:
        yield from ((1 - mixed) * features, (1 + mixed) * features)


def _left(seen: HeadGradient, features: Tensor) -> float:
    """Mean squared residual over the variance of the noise; without any, over the gradient's."""
    if seen.noisy:
        return unexplained(seen, features)
    value = Objective(seen)(features)
    return float(value.residual.square().mean()) / seen.noise if seen.noise else float(value.loss)


def _by_chance(seen: HeadGradient, features: Tensor) -> float:
    """Part of the noise's mean square that fitting so many features takes away."""
    parts = [seen.grad_output]
    if seen.noisy:
        parts += [seen.grad_hidden, seen.grad_bias]
    return features.numel() / sum(part.numel() for part in parts)


def _in_order(found: Tensor, of: Tensor) -> Tensor:
    """The rows of `found` (N, d), each where `of` has what is nearest."""
    _, nearest = linear_sum_assignment(torch.cdist(of, found).cpu().numpy())
    return found[torch.from_numpy(nearest).to(found.device)]
