"""How much of the observed ∂L/∂A = D σ(X W' + b) of a two-layer head given features X explain.

For fixed X the best D is a linear least-squares solution, which leaves a nonlinear problem in X
alone (variable projection: Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973). Entries that a
defense has set to zero are known to be smaller than those that it kept: they count only where the
prediction exceeds that bound (censored least squares: Tobin, Econometrica 26, 1958), which keeps
the problem in D convex.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features._head_gradient import HeadGradient, labels_of

_RIDGE = 1e-9
_PASSES = 4
"""Newton steps at most for D under censoring; warm started, mostly one or two."""
_SAME = 1e-3
"""Relative change of D at which they have converged."""
_WEAKEST = 1e-4
"""Least curvature that is told apart, in units of the largest."""


class Value(NamedTuple):
    """The objective at some features (n, d)."""

    loss: Tensor
    """Share of ∂L/∂A's energy that is left unexplained (0-d)."""
    slope: Tensor
    """Its gradient (n, d)."""
    errors: Tensor
    """The best D (K, n)."""
    residual: Tensor
    """What is left of ∂L/∂A (K, m)."""


@final
class Objective:
    """The share of ∂L/∂A that features leave unexplained, as a function of them."""

    def __init__(self, head: HeadGradient) -> None:
        """Compares with `head`; entries of zero count as removed if its update was pruned."""
        self.head = head
        self._observed = head.grad_output
        self._energy = self._observed.square().sum()
        self._kept: Tensor | None = None
        if head.pruned:
            self._kept = self._observed != 0
            least = self._observed[self._kept].abs().min()
            self._bound = least if head.smallest_removed else torch.full_like(least, torch.inf)
        self._errors: Tensor | None = None

    def __call__(self, features: Tensor) -> Value:
        """Evaluates the objective at `features` (n, d)."""
        head = self.head
        with torch.enable_grad():
            preactivation = (features @ head.hidden.T + head.bias).detach().requires_grad_()
            hidden = head.activation(preactivation)
        errors, residual = self._project(hidden.detach())
        # At the best D the loss depends on the features through the hidden values alone.
        pull = -2 / self._energy * (errors.T @ residual)
        (slope,) = torch.autograd.grad(hidden, preactivation, pull)
        loss = residual.square().sum() / self._energy
        return Value(loss, slope @ head.hidden, errors, residual)

    def scale(self, value: Value, features: Tensor) -> Tensor:
        """Computes R (n, n) such that the objective in R⁻¹ `features` curves alike everywhere.

        Away from the span of the features its Gauss-Newton matrix is, for Gaussian W,
        (D'D ∘ P) ⊗ I with P_ik the share of neurons that both features activate. Images of one
        label have nearly the same column of D and make it ill-conditioned.
        """
        head = self.head
        with torch.enable_grad():
            preactivation = (features @ head.hidden.T + head.bias).detach().requires_grad_()
            (active,) = torch.autograd.grad(head.activation(preactivation).sum(), preactivation)
        curvature = ((value.errors.T @ value.errors) * (active @ active.T)).double()
        values, vectors = torch.linalg.eigh(curvature)
        values = values / values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        root = (vectors * values.clamp(min=_WEAKEST).rsqrt()) @ vectors.T
        size = torch.linalg.vector_norm(features, dim=1).mean()
        scale: Tensor = size * root.to(features.dtype)
        return scale

    def noise_floor(self, variance: float, unknowns: int = 0) -> float:
        """Computes the loss at the truth, by noise of that variance in each entry.

        With `unknowns`, at the best fit, which explains some of the noise itself.
        """
        return variance * (self._observed.numel() - unknowns) / float(self._energy)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Solves for the best D (K, n) of hidden values (n, m); returns it and residuals (K, m)."""
        if self._kept is not None:
            return self._censored(hidden, self._kept)
        gram = (hidden @ hidden.T).double()[None]
        errors = _solve(gram, (self._observed @ hidden.T).double()).to(hidden.dtype)
        return errors, self._observed - errors @ hidden

    def _censored(self, hidden: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Does the same where only the entries `kept` (K, m) are known, by Newton steps."""
        n = len(hidden)
        row, column = torch.triu_indices(n, n)
        pairs = hidden[row] * hidden[column]
        errors = self._errors if self._errors is not None and self._errors.shape[1] == n else None
        target, counted = self._observed, kept
        for _ in range(_PASSES):
            before = errors
            if errors is not None:
                bounded = (errors @ hidden).clamp_(-self._bound, self._bound)
                counted = kept | (bounded.abs() == self._bound)
                target = torch.where(kept, self._observed, bounded)
            weights = counted.to(hidden.dtype)
            gram = hidden.new_empty(len(weights), n, n, dtype=torch.float64)
            gram[:, row, column] = gram[:, column, row] = (weights @ pairs.T).double()
            errors = _solve(gram, ((weights * target) @ hidden.T).double()).to(hidden.dtype)
            if before is not None and (errors - before).abs().max() <= _SAME * errors.abs().max():
                break
        assert errors is not None
        self._errors = errors
        predicted = errors @ hidden
        bounded = predicted.clamp(-self._bound, self._bound)
        return errors, torch.where(kept, self._observed, bounded) - predicted


def _solve(gram: Tensor, right: Tensor) -> Tensor:
    """Solves normal equations for D (K, n): gram (K or 1, n, n), right (K, n), in float64."""
    n = gram.shape[-1]
    ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).mean() + torch.finfo(gram.dtype).tiny
    regular = gram + ridge * torch.eye(n, dtype=gram.dtype, device=gram.device)
    solution: Tensor = torch.linalg.solve(regular, right[..., None])
    return solution[..., 0]


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
