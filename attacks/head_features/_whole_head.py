"""How much of a two-layer head's whole gradient features leave unexplained.

∂L/∂A alone (`head_objective`) leaves the error signals D free. The whole gradient does not: D
follows from features and labels, N D_i = softmax(f(x_i)) - y_i.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features._feature_norms import labels_of
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective


@final
class WholeHead:
    """Computes the mean squared residual of the head's whole gradient over the noise's variance.

    |p - o|² is computed as |p|² - 2 <p, o> + |o|². Of ∂L/∂W that takes products with N vectors, and
    no tensor of its size is ever written.
    """

    def __init__(self, head: HeadGradient, labels: Tensor) -> None:
        """Prepares the comparison for images of these `labels` (N,)."""
        self._head = head
        self._targets = F.one_hot(labels, len(head.output)).to(head.hidden.dtype)
        self._outer = head.grad_output / head.divisor
        observed = (head.grad_hidden, head.grad_bias, self._outer)
        self._square = torch.stack([each.double().square().sum() for each in observed]).sum()
        self._unit = sum(each.numel() for each in observed) * head.noise / head.divisor**2

    def __call__(self, features: Tensor, width: float = 0.0) -> Tensor:
        """Computes it at `features` (N, d) with their norms: 0-d float64, differentiable in them.

        Jumps of the activation's slope are taken to be `width` standard deviations wide.
        """
        head = self._head
        preactivation = features @ head.hidden.T + head.bias
        hidden = head.activation(preactivation)
        active = self._slope(preactivation, width)
        errors = ((hidden @ head.output.T).softmax(1) - self._targets) / len(features)
        pulls = (errors @ head.output) * active  # ∂L/∂W = pulls' features, ∂L/∂b = Σ pulls
        outer = errors.T @ hidden / head.divisor
        square = ((pulls @ pulls.T) * (features @ features.T + 1)).double().sum()
        square = square + outer.double().square().sum()
        across = pulls * (features @ head.grad_hidden.T + head.grad_bias)
        product = across.double().sum() + (outer * self._outer).double().sum()
        factor = product / square if head.clipped else 1.0
        return (factor**2 * square - 2 * factor * product + self._square) / self._unit

    def _slope(self, at: Tensor, width: float) -> Tensor:
        """Computes σ' at pre-activations (N, m)."""
        if width and self._head.config.activation in ("relu", "leaky_relu"):
            below, above = self._slope(at.new_tensor([-1.0, 1.0]), 0).unbind()
            return below + (above - below) * torch.sigmoid(at / (width * at.detach().std()))
        slope: Tensor
        with torch.enable_grad():
            at = at if at.requires_grad else at.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._head.activation(at).sum(), at, create_graph=True)
        return slope


def unexplained(head: HeadGradient, features: Tensor) -> float:
    """Computes `WholeHead` at `features` of the labels that they imply: about 1 at the truth."""
    labels = labels_of(head, features, Objective(head)(features).errors)
    return float(WholeHead(head, labels)(features.detach()).detach())
