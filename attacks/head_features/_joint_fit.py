"""Features behind noise, from all of a two-layer head's gradient at once.

∂L/∂A alone (`head_fit`) leaves the error signals D free. But images of one label have nearly the
same, and noise then hides which of two features is whose. What else the head shows settles it: D
follows from the features, N D_i = softmax(f(x_i)) - y_i, and ∂L/∂W has the same noise in each entry
and features in its row space. Where that stands out of the noise, ∂L/∂A is fitted in its
coordinates first, N for each feature in place of d. Then all of the gradient is fitted together: at
the true features the mean squared residual is the variance of the noise, which tells a local
minimum from the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features import head_fit
from fedsim_attacks.head_features._feature_norms import labels_of
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features.head_fit import Fit
from fedsim_attacks.head_features.spectral_features import span

_CLEAR = 1.2
"""Times the edge of noise, from which a direction of ∂L/∂W shows where images are. Half of them
have to: what the others hide, the fit of all finds."""
_EXPLAINED = (1.01, 1.03, 1.03)
"""Mean squared residual, over the noise's variance, up to which features explain all, after the
first, second and third go; each takes as long again."""
_CHUNK = 20
_LITTLE = 1e-4
"""Relative gain of as many iterations below which the fit has converged."""
_WIDTHS = (0.1, 0.01, 0.0)
"""Of the jumps of ReLU's slope, one fit after the other, in standard deviations of its inputs. With
jumps as they are, the objective jumps too, and each piece of it has a minimum of its own."""
_MOST = 5
"""Times as many iterations at each width."""


@final
class WholeHead:
    """Mean squared residual of the head's whole gradient, in units of the noise's variance.

    |p - o|² as |p|² - 2 <p, o> + |o|²: of ∂L/∂W that takes products with N vectors, and none of its
    size is ever written.
    """

    def __init__(self, seen: HeadGradient, labels: Tensor) -> None:
        """For images of these `labels` (N,)."""
        self._seen = seen
        self._targets = F.one_hot(labels, len(seen.output)).to(seen.hidden.dtype)
        self._outer = seen.grad_output / seen.divisor
        observed = (seen.grad_hidden, seen.grad_bias, self._outer)
        self._square = torch.stack([each.double().square().sum() for each in observed]).sum()
        self._unit = sum(each.numel() for each in observed) * seen.noise / seen.divisor**2

    def __call__(self, features: Tensor, width: float = 0.0) -> Tensor:
        """At `features` (N, d), with their norms: 0-d float64, differentiable in them.

        Jumps of the activation's slope are taken to be `width` standard deviations wide.
        """
        seen = self._seen
        preactivation = features @ seen.hidden.T + seen.bias
        hidden = seen.activation(preactivation)
        active = self._slope(preactivation, width)
        errors = ((hidden @ seen.output.T).softmax(1) - self._targets) / len(features)
        pulls = (errors @ seen.output) * active  # ∂L/∂W = pulls' features, ∂L/∂b = Σ pulls
        outer = errors.T @ hidden / seen.divisor
        square = ((pulls @ pulls.T) * (features @ features.T + 1)).double().sum()
        square = square + outer.double().square().sum()
        across = pulls * (features @ seen.grad_hidden.T + seen.grad_bias)
        product = across.double().sum() + (outer * self._outer).double().sum()
        factor = product / square if seen.clipped else 1.0
        return (factor**2 * square - 2 * factor * product + self._square) / self._unit

    def _slope(self, at: Tensor, width: float) -> Tensor:
        """σ' at (N, m)."""
        if width and self._seen.config.activation in ("relu", "leaky_relu"):
            below, above = self._slope(at.new_tensor([-1.0, 1.0]), 0)
            return below + (above - below) * torch.sigmoid(at / (width * at.detach().std()))
        with torch.enable_grad():
            at = at if at.requires_grad else at.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._seen.activation(at).sum(), at, create_graph=True)
        return slope


@dataclass(kw_only=True)
class Joint:
    """The fit of ∂L/∂A, then that of all, and what came of them so far."""

    seen: HeadGradient
    coarse: Fit
    basis: Tensor | None
    """(N, d): in whose coordinates `coarse` is."""
    spare: list[tuple[Tensor | None, list[Tensor]]]
    """Bases and starts of further goes, the next one last."""
    descent: _Descent | None = None
    features: Tensor | None = None
    """(N, d): the best so far."""
    loss: Tensor
    """Their `WholeHead`."""
    iteration: int = 0
    over: bool = False


def applies(seen: HeadGradient) -> bool:
    """Whether noise has left most of the features' span to be seen in ∂L/∂W."""
    if not seen.noisy or seen.pruned or seen.steps > 1 or not seen.noise:
        return False
    rows, weights = seen.rows.double(), seen.output.double().var(0, correction=0)
    lengths = torch.linalg.eigvalsh(rows.T @ rows).flip(0)
    total, squares = weights.sum(), weights.square().sum()
    # The largest that rows of these weights have of noise alone (Marchenko and Pastur's edge).
    edge = total * (1 + (rows.shape[1] * squares / total.square()).sqrt()).square()
    median = lengths[seen.rank // 2] * seen.divisor**2 / seen.noise
    return bool(median > _CLEAR * edge)


def begin(seen: HeadGradient, starts: int, rng: torch.Generator) -> Joint:
    """Before anything is fitted; `starts` as for `head_fit`.

    Raises:
        AttackFailed: nothing is left of ∂L/∂A.
    """
    basis = span(seen.rows, seen.rank)[0].to(seen.hidden.dtype)
    spare: list[tuple[Tensor | None, list[Tensor]]] = []
    while len(spare) <= len(_EXPLAINED):  # by turns, since the span may lead astray
        for within in (basis, None):
            drawn = head_fit.random_starts(_within(seen, within), 2 * starts, rng)
            spare.insert(0, (within, list(drawn)))
    return Joint(
        seen=seen,
        coarse=_coarse(seen, *spare[-1]),
        basis=spare.pop()[0],
        spare=spare,
        loss=torch.full((), torch.inf, device=seen.hidden.device),
    )


def descended(seen: HeadGradient, features: Tensor) -> Tensor:
    """Features (N, d) that explain all of the head's gradient best, near `features`."""
    descent = _Descent(seen, features)
    while not descent.settled:
        descent.run()
    return descent.features


def unexplained(seen: HeadGradient, features: Tensor) -> float:
    """`WholeHead` at `features`, of the labels that they imply: 1 at the truth, but for chance."""
    labels = labels_of(seen, features, Objective(seen)(features).errors)
    return float(WholeHead(seen, labels)(features.detach()).detach())


def improve(state: Joint, most: int) -> Joint:
    """20 iterations of the fit of ∂L/∂A, `most` in all, or of that of the whole gradient."""
    if not head_fit.finished(state.coarse, most):
        before = state.coarse.iteration
        state.coarse = head_fit.improve(state.coarse, most - before)
        state.iteration += state.coarse.iteration - before
        return state
    if state.descent is None:
        state.descent = _Descent(state.seen, _found(state.coarse, state.basis))
    state.descent.run()
    state.iteration += _CHUNK
    if bool(state.descent.loss < state.loss):
        state.features, state.loss = state.descent.features, state.descent.loss
    if state.descent.settled:
        gone = len(_EXPLAINED) - len(state.spare)
        state.over = not state.spare or bool(state.loss < _EXPLAINED[gone])
        if not state.over:
            state.basis, starts = state.spare.pop()
            state.coarse = _coarse(state.seen, state.basis, starts)
            state.descent = None
    return state


def _within(seen: HeadGradient, basis: Tensor | None) -> HeadGradient:
    return seen if basis is None else seen.within(basis)


def _coarse(seen: HeadGradient, basis: Tensor | None, starts: list[Tensor]) -> Fit:
    half = len(starts) // 2
    return head_fit.begin(_within(seen, basis), starts[:half], spare=starts[half:])


def _found(fit: Fit, basis: Tensor | None) -> Tensor:
    features = head_fit.scaled(fit)
    return features if basis is None else features @ basis


class _Descent:
    """L-BFGS over the features, for the labels that they imply at the start."""

    def __init__(self, seen: HeadGradient, features: Tensor) -> None:
        errors = Objective(seen)(features).errors
        self._objective = WholeHead(seen, labels_of(seen, features, errors))
        self._unit = torch.linalg.vector_norm(features, dim=1).mean()
        self._variable = (features / self._unit).requires_grad_()
        self._widths = list(_WIDTHS)
        self._begin()

    @property
    def features(self) -> Tensor:
        """(N, d)."""
        return self._variable.detach() * self._unit

    @property
    def loss(self) -> Tensor:
        """Theirs (0-d)."""
        return self._objective(self.features).detach().float()

    @property
    def settled(self) -> bool:
        """Whether all widths are done."""
        return not self._widths

    def _begin(self) -> None:
        self._before, self._left = torch.inf, _MOST
        self._optimizer = torch.optim.LBFGS(
            [self._variable],
            max_iter=_CHUNK,
            max_eval=2 * _CHUNK,
            history_size=30,
            tolerance_grad=1e-12,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

    def run(self) -> None:
        """20 iterations; where these gain little, on to the next width."""
        width = self._widths[0]

        def closure() -> Tensor:
            self._optimizer.zero_grad()
            with torch.enable_grad():
                value = self._objective(self._variable * self._unit, width)
                value.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        self._optimizer.step(closure)  # type: ignore[no-untyped-call]
        after = float(self._objective(self.features, width).detach())
        self._left -= 1
        if not self._left or not after < self._before * (1 - _LITTLE):
            self._widths.pop(0)
            self._begin()
        else:
            self._before = after
