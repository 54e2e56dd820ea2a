"""Features behind noise, from all of a two-layer head's gradient at once.

∂L/∂A alone (`head_fit`) leaves the error signals D free. But images of one label have nearly the
same, and noise then hides which of two features belongs to which image. What else the head shows
settles it: D follows from the features, and ∂L/∂W has the same noise in each entry and features in
its row space. Where that stands out of the noise, ∂L/∂A is fitted in its coordinates first, N for
each feature in place of d. Then all of the gradient is fitted together: at the true features the
mean squared residual is the variance of the noise, which tells a local minimum from the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.types import Reconstruction
from fedsim_attacks._attack_kinds import FeatureSolver
from fedsim_attacks.head_features._head_gradient import (
    HeadGradient,
    Objective,
    WholeHead,
    labels_of,
)
from fedsim_attacks.head_features.head_fit import (
    ITERATIONS,
    OutputFit,
    OutputSolver,
    lbfgs,
    random_starts,
)
from fedsim_attacks.head_features.spectral_features import span

_CLEAR = 1.2  # length over noise's edge that half of ∂L/∂W's directions need to show the span
_EXPLAINED = (1.01, 1.03, 1.03)
"""Residual over the noise's variance that explains all, after each attempt but the last."""
_LITTLE = 1e-4  # relative gain of a run below which the fit has converged
_WIDTHS = (0.1, 0.01, 0.0)
"""Widths of ReLU's jumps, one fit each, in deviations of its inputs: jumps make local minima."""
_MOST = 5  # runs at each width, at most


class JointSolver(FeatureSolver):
    """Fits ∂L/∂A, then all of the gradient; and again while too much is left unexplained."""

    def __init__(self, head: HeadGradient, starts: int, budget: int, rng: torch.Generator) -> None:
        """Prepares attempts from `starts` random features, and as many more if they lead astray."""
        inside = head.restrict(span(head.rows, head.rank)[0].to(head.hidden.dtype))
        attempts: list[OutputSolver] = []
        while len(attempts) <= len(_EXPLAINED):  # by turns, since the span may lead astray
            for directions in (inside, head):
                drawn = list(random_starts(directions, 2 * starts, rng))
                fit = OutputFit(directions, drawn[:starts])
                attempts.insert(0, OutputSolver(fit, budget, drawn[starts:]))
        self.head, self.output, self.attempts = head, attempts.pop(), attempts
        """`output` is the present attempt's fit of ∂L/∂A; `attempts` may follow, the last first."""
        self.descent: _JointDescent | None = None
        """The present attempt's fit of the whole gradient; None until that of ∂L/∂A has ended."""
        self.features: Tensor | None = None
        """(N, d): the best so far; None until a fit of the whole gradient has begun."""
        super().__init__(loss=self.output.loss)

    def improve(self) -> None:
        if not self.output.finished:
            before = self.output.iteration
            self.output.improve()
            self.iteration += self.output.iteration - before
            return
        if self.descent is None:
            fitted = self.output.attempt.head.lift(self.output.scale_features())
            self.descent = _JointDescent(self.head, fitted)
        self.descent.run()
        self.iteration += ITERATIONS
        if bool(self.descent.loss < self.loss):
            self.features, self.loss = self.descent.features, self.descent.loss
        if self.descent.settled:
            # Later attempts are content with more: each costs as much as the first.
            ended = len(_EXPLAINED) - len(self.attempts)
            self.over = not self.attempts or bool(self.loss < _EXPLAINED[ended])
            if not self.over:
                self.output, self.descent = self.attempts.pop(), None

    def reconstruction(self) -> Reconstruction:
        """Returns `features`, which must not be None; the loss is `WholeHead` at them."""
        assert self.features is not None
        return Reconstruction(
            features=self.features.float(), loss=float(self.loss), iterations=self.iteration
        )


def joint_fit_applies(head: HeadGradient) -> bool:
    """Says whether half of the features' directions stand out of the noise, if any, in ∂L/∂W."""
    if not head.noisy or head.pruned or head.steps > 1 or not head.noise:
        return False
    rows, weights = head.rows.double(), head.output.double().var(0, correction=0)
    lengths = torch.linalg.eigvalsh(rows.T @ rows).flip(0)
    total, squares = weights.sum(), weights.square().sum()
    # The largest that rows of these weights have of noise alone (Marchenko and Pastur's edge).
    edge = total * (1 + (rows.shape[1] * squares / total.square()).sqrt()).square()
    # Half of the directions have to stand out, hence the median one.
    median = lengths[head.rank // 2] * head.divisor**2 / head.noise
    return bool(median > _CLEAR * edge)


def fit_whole_gradient(head: HeadGradient, features: Tensor) -> Tensor:
    """Fits the whole noisy gradient from near `features` in true lengths; returns (N, d)."""
    descent = _JointDescent(head, features)
    while not descent.settled:
        descent.run()
    return descent.features


class _JointDescent:
    """Descends by L-BFGS over the features, for the labels that they imply at the start."""

    def __init__(self, head: HeadGradient, features: Tensor) -> None:
        errors = Objective(head)(features).errors
        self._objective = WholeHead(head, labels_of(head, features, errors))
        self._unit: Tensor = torch.linalg.vector_norm(features, dim=1).mean()
        self._variable: Tensor = (features / self._unit).requires_grad_()
        self._widths = list(_WIDTHS)
        self._begin()

    @property
    def features(self) -> Tensor:
        return self._variable.detach() * self._unit

    @property
    def loss(self) -> Tensor:
        return self._objective(self.features).detach().float()

    @property
    def settled(self) -> bool:
        return not self._widths

    def _begin(self) -> None:
        self._before, self._runs_left = torch.inf, _MOST
        self._optimizer = lbfgs(self._variable)

    def run(self) -> None:
        """Runs 20 iterations at most; where these gain little, goes on to the next width."""
        width = self._widths[0]

        def closure() -> Tensor:
            self._optimizer.zero_grad()
            with torch.enable_grad():
                value = self._objective(self._variable * self._unit, width)
                torch.autograd.backward(value)
            return value.detach()

        self._optimizer.step(closure)  # type: ignore[no-untyped-call]
        after = float(self._objective(self.features, width).detach())
        self._runs_left -= 1
        # A new width is another objective, for which L-BFGS begins without memory.
        if not self._runs_left or not after < self._before * (1 - _LITTLE):
            self._widths.pop(0)
            self._begin()
        else:
            self._before = after
