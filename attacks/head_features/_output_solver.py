"""Features by fits of ∂L/∂A: a second attempt after a local minimum, and a coarse fit before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedsim.types import Reconstruction
from fedsim_attacks.head_features._feature_norms import norms
from fedsim_attacks.head_features._feature_solver import FeatureSolver
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features._lbfgs import ITERATIONS
from fedsim_attacks.head_features._output_fit import WEIGHTS, OutputFit

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

    @classmethod
    def start(
        cls,
        head: HeadGradient,
        starts: list[Tensor],
        budget: int,
        *,
        second_starts: Sequence[Tensor] = (),
        splitting: bool = True,
        all_neurons: bool = False,
        weights: int = WEIGHTS,
    ) -> OutputSolver:
        """Prepares the first attempt.

        Args:
            head: the observed gradient.
            starts: features (N, d) to start from.
            budget: iterations, over all attempts.
            second_starts: those of the second attempt; without any there is none.
            splitting: as `OutputFit.start`, of both attempts.
            all_neurons: as `OutputFit.start`, of the first.
            weights: as `OutputFit.start`, of the first.

        Raises:
            AttackFailed: nothing is left of ∂L/∂A.
        """
        attempt = OutputFit.start(
            head, starts, splitting=splitting, all_neurons=all_neurons, weights=weights
        )
        return cls(
            attempt=attempt, budget=budget, second_starts=list(second_starts), loss=attempt.loss
        )

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
    solver = OutputSolver.start(head, [features], budget, splitting=False, all_neurons=True)
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
    """Of iterations, half of them for the coarse fit."""
    second_starts: list[Tensor]
    """Starts (N, d) of the fine fit's second attempt."""
    fine: bool = False
    """Whether `fit` is in all directions by now."""

    @classmethod
    def start(
        cls,
        head: HeadGradient,
        directions: HeadGradient,
        starts: list[Tensor],
        budget: int,
        second_starts: list[Tensor],
    ) -> CoarseToFine:
        """Prepares the coarse fit.

        Args:
            head: the observed gradient.
            directions: the same within the directions of the coarse fit.
            starts: coordinates in them to start from.
            budget: iterations of both fits.
            second_starts: coordinates that the fine fit's second attempt starts from.

        Raises:
            AttackFailed: nothing is left of ∂L/∂A.
        """
        fit = OutputSolver.start(directions, starts, budget // 2, splitting=False, all_neurons=True)
        return cls(
            head=head,
            fit=fit,
            budget=budget,
            second_starts=[directions.lifted(each) for each in second_starts],
            loss=fit.loss,
        )

    @property
    def finished(self) -> bool:
        """Whether the fine fit is finished."""
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
        self.fit = OutputSolver.start(
            self.head,
            [coarse.head.lifted(coarse.features)],
            self.budget,
            second_starts=self.second_starts,
            all_neurons=float(coarse.loss) < _NEARLY,
        )
        self.fit.iteration, self.fine = self.iteration, True

    @property
    def misfit(self) -> Tensor:
        """That of the present fit."""
        return self.fit.misfit

    def reconstruction(self) -> Reconstruction:
        """Returns that of the present fit."""
        return self.fit.reconstruction()
