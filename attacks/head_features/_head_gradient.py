"""What the gradient of a two-layer head f(x) = A σ(W x + b) shows of the features x of its batch.

With the mean cross-entropy over N images, D_ki = (p_ki - y_ki) / N and s_ij = Σ_k D_ki A_kj,

    ∂L/∂A_kj = Σ_i D_ki σ(w_j'x_i + b_j)
    ∂L/∂w_j  = Σ_i s_ij σ'(w_j'x_i + b_j) x_i        ∂L/∂b_j the same without x_i

(Liu et al., Data Reconstruction Attacks and Defenses, section 2.1 and Appendix B; their head has no
bias and a factor 1/m; where the head has it, A stands for A / m here, ∂L/∂A for m times itself.)

`Objective` says how much of ∂L/∂A = D σ(X W' + b) given features X explain. For fixed X the best D
is a linear least-squares solution, which leaves a nonlinear problem in X alone (variable
projection: Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973). Entries that a defense has set to
zero are known to be smaller than those that it kept: they count only where the prediction exceeds
that bound (censored least squares: Tobin, Econometrica 26, 1958), which keeps the problem in D
convex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import HeadConfig
from fedsim.models.head import TwoLayerHead
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.models.victim import rebuild
from fedsim.types import Observation

_BEYOND = 1.05  # length of a direction over the edge of noise, from which it is an image's


@dataclass(frozen=True, kw_only=True)
class HeadGradient:
    """Holds the head's weights and the observed mean gradient of its parameters.

    m hidden neurons, the last `config.planted` by the server; d features; K classes; N images.
    """

    hidden: Tensor  # W (m, d), float32
    bias: Tensor  # b (m,)
    output: Tensor  # A (K, m), divided by `divisor`
    activation: Callable[[Tensor], Tensor]  # σ, element-wise
    config: HeadConfig
    grad_hidden: Tensor  # ∂L/∂W (m, d), zero where a defense removed an entry
    grad_bias: Tensor  # ∂L/∂b (m,)
    grad_output: Tensor  # ∂L/∂A (K, m), multiplied by `divisor`
    num_images: int
    pruned: bool  # whether the declared defenses set entries to zero
    smallest_removed: bool
    """Whether removed entries, if any, are smaller in magnitude than all left of their tensor."""
    noisy: bool
    exact: bool  # whether the declared defenses leave the row space of ∂L/∂W as it is
    clipped: bool  # whether the client may have scaled its update by a factor of its own
    dropout: bool  # whether each image met other neurons, which no formula above allows for
    steps: int  # local steps E on the same batch; 1 if each had images of its own
    first_share: float  # share of the first step in the mean gradient
    divisor: float  # m, if the head divides by it; else 1
    basis: Tensor | None = None  # (n, d), if features here are coordinates in it

    @staticmethod
    def read(observation: Observation) -> HeadGradient:
        """Reads the mean gradient of steps and clients; AttackFailed without a two-layer head."""
        model = rebuild(observation)
        if not isinstance(model.head, TwoLayerHead):
            raise AttackFailed(
                "features are recovered from a two-layer head: give the model one (`head: {width: "
                "..., planted: ...}`)"
            )
        factor = mean_gradient_factor(observation.training)
        gradient = {
            name: observation.update[f"head.{name}"].detach() * factor
            for name in ("hidden.weight", "hidden.bias", "output.weight")
        }
        if not any(bool(part.any()) for part in gradient.values()):
            raise AttackFailed("nothing is left of the update of the head")
        head = model.head
        effect = observation.effect
        training = observation.training
        weights = step_weights(training)
        divisor = float(head.config.width if head.config.divided else 1)
        return HeadGradient(
            hidden=head.hidden.weight.detach(),
            bias=head.hidden.bias.detach(),
            # A / m and m ∂L/∂A in place of A and ∂L/∂A: the formulas above then need no divisor.
            output=head.output.weight.detach() / divisor,
            activation=head.activation,
            config=head.config,
            grad_hidden=gradient["hidden.weight"],
            grad_bias=gradient["hidden.bias"],
            grad_output=gradient["output.weight"] * divisor,
            num_images=observation.num_images,
            pruned=effect.removed is not None,
            smallest_removed=effect.removed != "others",
            noisy=effect.noisy,
            exact=effect.exact and training.sums_gradients,
            clipped=effect.scaled,
            dropout=training.dropout > 0,
            steps=len(weights) if training.batches == "same" else 1,
            first_share=weights[0] / sum(weights),
            divisor=divisor,
        )

    @cached_property
    def planted(self) -> slice:
        """Slice of the planted neurons; of all neurons if none are planted."""
        count = self.config.planted
        return slice(self.hidden.shape[0] - count if count else 0, None)

    @property
    def rows(self) -> Tensor:
        """Rows (v, d) of ∂L/∂W, weighted to show the span of the features; v may be 0."""
        # With noise, long rows tell most: each is weighted by the length to expect of its neuron.
        if self.noisy:
            return self.grad_hidden * self.output.std(0, correction=0)[:, None]
        length: Tensor = torch.linalg.vector_norm(self.grad_hidden.double(), dim=1, keepdim=True)
        kept = length[:, 0] > 0
        return self.grad_hidden[kept] / length[kept].to(self.grad_hidden.dtype)

    def restrict(self, basis: Tensor) -> HeadGradient:
        """Returns this gradient with features as n coordinates in an orthonormal `basis` (n, d)."""
        return replace(
            self, hidden=self.hidden @ basis.T, grad_hidden=self.grad_hidden @ basis.T, basis=basis
        )

    def lift(self, features: Tensor) -> Tensor:
        """Turns coordinates (N, n) in `basis` into features (N, d); changes nothing without one."""
        return features if self.basis is None else features @ self.basis

    def subset(self, equations: int, fewest: int = 1) -> HeadGradient:
        """Returns the gradient of `fewest` or more neurons, enough for so many `equations`."""
        # A neuron gives one for each entry left of ∂L/∂A: those with most come first.
        m = self.hidden.shape[0]
        entries = (
            (self.grad_output != 0).sum(0) if self.pruned else torch.full((m,), len(self.output))
        )
        # ∂L/∂A = D H with N columns of D: more than N entries of a neuron follow from N of them.
        entries = entries.clamp(max=self.num_images)
        order = entries.argsort(descending=True, stable=True)
        count = max(fewest, 1 + int((entries[order].cumsum(0) < equations).sum()))
        # More than half of the neurons would save little time.
        if 2 * count > m:
            return self
        chosen = torch.arange(count) * m // count if not self.pruned else order[:count].sort()[0]
        planted = int((chosen >= m - self.config.planted).sum())
        return replace(
            self,
            hidden=self.hidden[chosen],
            bias=self.bias[chosen],
            output=self.output[:, chosen],
            config=self.config.model_copy(update={"width": count, "planted": planted}),
            grad_hidden=self.grad_hidden[chosen],
            grad_bias=self.grad_bias[chosen],
            grad_output=self.grad_output[:, chosen],
        )

    @property
    def noise(self) -> float:
        """Variance of noise or stochastic rounding in an entry of `grad_output`; 0 if unseen."""
        m, d = self.grad_hidden.shape
        outside = d - self.rank
        if self.noisy and outside:
            gram = (self.grad_hidden.T @ self.grad_hidden).double()
            lengths = torch.linalg.eigvalsh(gram).clamp(min=0) / m
            edge = lengths[:outside].mean() * (1 + (d / m) ** 0.5) ** 2 * _BEYOND
            each = lengths[: max(outside, int((lengths < edge).sum()))].mean()
            # `grad_output` was multiplied by the divisor, and its noise with it.
            return float(each) * self.divisor**2
        size = self.grad_output.abs()
        # Stochastic rounding to a spacing s has a variance of s² / 6, in the mean over entries.
        rounded = not (self.exact or self.noisy or self.pruned)
        return float(size[size > 0].min()) ** 2 / 6 if rounded and bool(size.any()) else 0.0

    @property
    def rank(self) -> int:
        """Number of directions that the batch's features can span: the lesser of N and d."""
        return min(self.num_images, self.hidden.shape[1])

    def respond(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Computes pre-activations z (N, m) of `features` (N, d), and the slopes σ'(z) there."""
        with torch.enable_grad():
            at = (features @ self.hidden.T + self.bias).detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self.activation(at).sum(), at)
        return at.detach(), slopes


def labels_of(head: HeadGradient, features: Tensor, errors: Tensor) -> Tensor:
    """Infers labels (N,) from `features` (N, d) in their true lengths and `errors` D (K, N)."""
    # N D_ki - softmax(f(x_i))_k is -1 at an image's label, and 0 elsewhere.
    hidden = head.activation(features @ head.hidden.T + head.bias)
    probabilities = (hidden @ head.output.T).softmax(1)
    targets = head.num_images * errors.T
    labels = targets.argmin(1)
    if head.clipped:
        implied = probabilities - F.one_hot(labels, len(errors))
        # Clipping scales all of D: the factor is fitted with the labels that argmin tells.
        targets = targets * (implied.square().sum() / (targets * implied).sum())
    return (targets - probabilities).argmin(1)


def find_norms(head: HeadGradient, features: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Finds factors (n,) that bring `features` (n, d) to true lengths, and misfits (n,).

    `errors` D is (K, n). Misfits are relative squared residuals. Factors are 1 where the activation
    is neither ReLU nor leaky ReLU.
    """
    # Under ReLU the gradient tells D only up to lengths: chosen are those at which
    # N D_i = softmax(f(x_i)) - y_i holds best.
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
    # A grid needs no start and serves all features at once: six decades, then finer at the best.
    for decades, points in ((3.0, 241), (0.025, 21)):
        around = best
        for exponent in torch.linspace(-decades, decades, points).tolist():
            factors = around * 10**exponent
            costs = cost(factors)
            best = torch.where(costs < residual, factors, best)
            residual = torch.minimum(costs, residual)
    return best, residual


_RIDGE = 1e-9  # ridge of the least squares for D, over the mean diagonal of their Gram matrix
_PASSES = 4  # Newton steps for D under censoring, at most; warm starts mostly take one or two
_SAME = 1e-3  # relative change of D at which they have converged
_WEAKEST = 1e-4  # least curvature that is told apart, in units of the largest


class Value(NamedTuple):
    """Holds the value of an `Objective` at some features (n, d)."""

    loss: Tensor  # share of ∂L/∂A's energy that is left unexplained (0-d)
    slope: Tensor  # gradient of `loss` in the features (n, d)
    errors: Tensor  # error signals D (K, n) that explain most at these features
    residual: Tensor  # part of ∂L/∂A (K, m) that is left unexplained


@final
class Objective:
    """Computes the share of ∂L/∂A that features (n, d) leave unexplained, as a function of them."""

    def __init__(self, head: HeadGradient) -> None:
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
        """Computes R (n, n) from `value` at `features` X; the objective curves alike in R⁻¹ X."""
        # Outside the span of the features X (n, d) the Gauss-Newton matrix is, for Gaussian W, (D'D
        # ∘ P) ⊗ I, with P_ik the share of neurons that both activate: images of one label spoil it.
        active = self.head.respond(features)[1]
        # Gauss-Newton: (D'D ∘ P) by images, the same in all directions across their span.
        curvature = ((value.errors.T @ value.errors) * (active @ active.T)).double()
        values, vectors = torch.linalg.eigh(curvature)
        # Nearly flat directions are not stretched without bound.
        values = values / values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        root = (vectors * values.clamp(min=_WEAKEST).rsqrt()) @ vectors.T
        size = torch.linalg.vector_norm(features, dim=1).mean()
        scale: Tensor = size * root.to(features.dtype)
        return scale

    def noise_floor(self, variance: float, unknowns: int = 0) -> float:
        """Computes the loss that noise of `variance` leaves in a fit of so many `unknowns`."""
        return variance * (self._observed.numel() - unknowns) / float(self._energy)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Solves for the best D (K, n) of hidden values (n, m); also returns residuals (K, m)."""
        if self._kept is not None:
            return self._project_censored(hidden, self._kept)
        gram = (hidden @ hidden.T).double()[None]
        errors = _solve(gram, (self._observed @ hidden.T).double()).to(hidden.dtype)
        return errors, self._observed - errors @ hidden

    def _project_censored(self, hidden: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Solves for the best D where only the entries `kept` (K, m) are known, by Newton steps."""
        n = len(hidden)
        row, column = torch.triu_indices(n, n)
        # Each class has entries of its own that count, and so a Gram matrix of its own.
        pairs = hidden[row] * hidden[column]
        errors = self._errors if self._errors is not None and self._errors.shape[1] == n else None
        target, counted = self._observed, kept
        for _ in range(_PASSES):
            before = errors
            if errors is not None:
                # Active set (Tobin, 1958): a removed entry counts where it is predicted too large.
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
    """Computes the mean squared residual of the head's whole gradient, over noise's variance."""

    # Of p implied and o observed, |p - o|² = |p|² - 2 <p, o> + |o|² takes products with N vectors:
    # no tensor of ∂L/∂W's size.

    def __init__(self, head: HeadGradient, labels: Tensor) -> None:
        """Prepares the comparison for images of these `labels` (N,); `head.noise` must not be 0."""
        self._head = head
        self._targets = F.one_hot(labels, len(head.output)).to(head.hidden.dtype)
        self._outer = head.grad_output / head.divisor
        observed = (head.grad_hidden, head.grad_bias, self._outer)
        self._square = torch.stack([each.double().square().sum() for each in observed]).sum()
        self._unit = sum(each.numel() for each in observed) * head.noise / head.divisor**2

    def __call__(self, features: Tensor, width: float = 0.0) -> Tensor:
        """Computes it (0-d) at `features` (N, d) in true lengths, ReLU's jumps `width` wide."""
        head = self._head
        preactivation = features @ head.hidden.T + head.bias
        hidden = head.activation(preactivation)
        active = self._slope(preactivation, width)
        errors = ((hidden @ head.output.T).softmax(1) - self._targets) / len(features)
        pulls = (errors @ head.output) * active  # ∂L/∂W = pulls' features, ∂L/∂b = Σ pulls
        outer = errors.T @ hidden / head.divisor
        # |Σ_i p_i x_i'|² = Σ_ij (p_i'p_j)(x_i'x_j), and 1 more for the bias: N² numbers, not m d.
        square = ((pulls @ pulls.T) * (features @ features.T + 1)).double().sum()
        square = square + outer.double().square().sum()
        across = pulls * (features @ head.grad_hidden.T + head.grad_bias)
        product = across.double().sum() + (outer * self._outer).double().sum()
        # Clipping: the factor of least squares, in closed form.
        factor = product / square if head.clipped else 1.0
        return (factor**2 * square - 2 * factor * product + self._square) / self._unit

    def _slope(self, at: Tensor, width: float) -> Tensor:
        if width and self._head.config.activation in ("relu", "leaky_relu"):
            below, above = self._slope(at.new_tensor([-1.0, 1.0]), 0).unbind()
            # The slope's jump at 0 as a sigmoid, whose width is in units of the inputs' deviation.
            return below + (above - below) * torch.sigmoid(at / (width * at.detach().std()))
        slope: Tensor
        with torch.enable_grad():
            at = at if at.requires_grad else at.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._head.activation(at).sum(), at, create_graph=True)
        return slope


def residual_over_noise(head: HeadGradient, features: Tensor) -> float:
    """Computes `WholeHead` at `features` (N, d) and the labels they imply; about 1 at the truth."""
    labels = labels_of(head, features, Objective(head)(features).errors)
    return float(WholeHead(head, labels)(features.detach()).detach())
