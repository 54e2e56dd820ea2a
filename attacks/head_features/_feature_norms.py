"""Norms of features of which a two-layer head's gradient shows the directions and error signals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features._head_gradient import HeadGradient


def labels_of(head: HeadGradient, features: Tensor, errors: Tensor) -> Tensor:
    """Infers labels (N,) int64 from `errors` D (K, N) and `features` (N, d) at their norms.

    N D_i - softmax(f(x_i)) is -1 at the label and 0 else, which noise hides less than where D_i,
    which is small for a confident model, is least.
    """
    hidden = head.activation(features @ head.hidden.T + head.bias)
    probabilities = (hidden @ head.output.T).softmax(1)
    targets = head.num_images * errors.T
    labels = targets.argmin(1)
    if head.clipped:
        implied = probabilities - F.one_hot(labels, len(errors))
        targets = targets * (implied.square().sum() / (targets * implied).sum())
    return (targets - probabilities).argmin(1)


def norms(head: HeadGradient, features: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Finds factors of `features` (n, d) at which they imply `errors` D (K, n), and residuals.

    Under ReLU ∂L/∂A determines D_i |x_i| only; but N D_i = softmax(f(x_i)) - y_i, so each norm is
    where that holds best, up to a relative squared residual. Both (n,).
    """
    preactivation = features @ head.hidden.T
    label = errors.argmin(0)
    targets = head.num_images * errors.T

    def cost(factors: Tensor) -> Tensor:
        hidden = head.activation(factors[:, None] * preactivation + head.bias)
        implied = (hidden @ head.output.T).softmax(1) - F.one_hot(label, len(errors))
        # In the units of the implied error, which a far too small or large norm cannot shrink.
        residual = targets / factors[:, None] - implied
        return residual.square().sum(1) / implied.square().sum(1)

    best = features.new_ones(len(features))
    residual = cost(best)
    if head.config.activation not in ("relu", "leaky_relu"):
        return best, residual  # others are not homogeneous: the fit has the norm
    for decades, points in ((3.0, 241), (0.025, 21)):
        around = best
        for exponent in torch.linspace(-decades, decades, points).tolist():
            factors = around * 10**exponent
            costs = cost(factors)
            best = torch.where(costs < residual, factors, best)
            residual = torch.minimum(costs, residual)
    return best, residual
