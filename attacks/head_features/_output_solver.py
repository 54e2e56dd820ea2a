"""Features by fits of ∂L/∂A: a second attempt after a local minimum, and a coarse fit before."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedsim.types import Reconstruction
from fedsim_attacks.head_features._feature_solver import FeatureSolver
from fedsim_attacks.head_features._head_gradient import HeadGradient, norms
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features._lbfgs import ITERATIONS
from fedsim_attacks.head_features._output_fit import OutputFit

_ENOUGH = 1e-7
"""Share of ∂L/∂A's energy left unexplained at which nothing more is worth an iteration."""
_NEARLY = 1e-4
"""Share that a coarse fit may leave; the directions that it lacks are then better added."""


@dataclass(kw_only=True)
class OutputSolver(FeatureSolver):
    """Fits ∂L/∂A, and once more from other starts if the first attempt ends in a local minimum."""

    attempt: OutputFit
    budget: int
    """Of iterations, over all attempts."""
    second_starts: list[Tensor] = field(default_factory=list)
    """Starts (N, d) of the second attempt."""
    first: tuple[Tensor, Tensor] | None = None
    """Loss and features of the first attempt, once the second has begun."""

    loss: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Begins with the loss of the first attempt."""
        self.loss = self.attempt.loss

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be gained, or the budget is spent."""
        ended = self.attempt.converged and not self._trapped
        done = ended or float(self.attempt.loss) < _ENOUGH
        return not self.attempt.untried and (done or self.iteration + ITERATIONS > self.budget)

    @property
    def nearly_finished(self) -> bool:
        """Whether neither iterations nor splits gain much by now, or next to nothing is left."""
        fit = self.attempt
        settled = fit.settled and not fit.stuck
        return not fit.untried and (settled or float(fit.loss) < _NEARLY)

    @property
    def _trapped(self) -> bool:
        """Whether the attempt is in a local minimum that another one may avoid."""
        return self.attempt.incomplete and bool(self.second_starts)

    def improve(self) -> None:
        """Takes a step of the present attempt, or begins the second."""
        fit = self.attempt
        if fit.converged and self._trapped and not fit.untried:
            self.first = fit.loss, fit.features
            self.attempt = OutputFit.start(fit.head, self.second_starts, splitting=fit.splitting)
            self.second_starts = []
        self.iteration += self.attempt.improve(self.budget - self.iteration)
        self.loss = self.attempt.loss

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        """Loss (0-d) and features (N, d) of the better attempt."""
        fit = self.attempt
        if self.first is not None and not (fit.all_neurons and fit.loss < self.first[0]):
            return self.first
        return fit.loss, fit.features

    @property
    def misfit(self) -> Tensor:
        """Relative residual of ∂L/∂A (0-d)."""
        return self.best[0].sqrt()

    @property
    def errors(self) -> Tensor:
        """D (K, N) that fits the features best."""
        return Objective(self.attempt.head)(self.best[1]).errors

    def scaled(self) -> Tensor:
        """Returns the features (N, d) at the norms that explain their own error signals."""
        features = self.best[1]
        return features * norms(self.attempt.head, features, self.errors)[0][:, None]

    def reconstruction(self) -> Reconstruction:
        """Returns the scaled features. The loss is the share of ∂L/∂A that they do not explain."""
        return Reconstruction(
            features=self.attempt.head.lifted(self.scaled()).float(),
            loss=float(self.best[0]),
            iterations=self.iteration,
        )


def descended(head: HeadGradient, features: Tensor, budget: int) -> Tensor:
    """Fits ∂L/∂A from `features` (N, d), within `budget` iterations; returns the fitted ones."""
    fit = OutputFit.start(head, [features], splitting=False, all_neurons=True)
    solver = OutputSolver(attempt=fit, budget=budget)
    while not solver.finished:
        solver.improve()
    return solver.scaled()


@dataclass(kw_only=True)
class CoarseToFine(FeatureSolver):
    """Fits ∂L/∂A in a few directions first, and from there in all."""

    head: HeadGradient
    """In all d directions."""
    fit: OutputSolver
    """The coarse one, then the fine one."""
    budget: int
    """Of iterations, together."""
    second_starts: list[Tensor]
    """Starts (N, d) of the fine fit's second attempt."""
    fine: bool = False
    """Whether `fit` is in all directions by now."""

    loss: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Begins with the loss of the coarse fit."""
        self.loss = self.fit.loss

    @property
    def finished(self) -> bool:
        return self.fine and self.fit.finished

    def improve(self) -> None:
        """Takes a step of the coarse fit, or of the fine one once that gains little."""
        if not self.fine and (self.fit.nearly_finished or self.fit.finished):
            self._refine()
        self.fit.improve()
        self.iteration, self.loss = self.fit.iteration, self.fit.loss

    def _refine(self) -> None:
        """Goes on in all directions: with all neurons if a subset would lead away."""
        coarse = self.fit.attempt
        start = coarse.head.lifted(coarse.features)
        fine = OutputFit.start(self.head, [start], all_neurons=float(coarse.loss) < _NEARLY)
        self.fit = OutputSolver(attempt=fine, budget=self.budget, second_starts=self.second_starts)
        self.fit.iteration, self.fine = self.iteration, True

    @property
    def misfit(self) -> Tensor:
        return self.fit.misfit

    def reconstruction(self) -> Reconstruction:
        return self.fit.reconstruction()
