"""The strongest feature attack for what was observed: which reproduces the observed ∂L/∂A best.

Exact rows are peeled (`activation_features`). What that leaves open or is disturbed is fitted,
from the features that peeling did find; where the row space is exact, in its coordinates, and where
pruning or rounding has blurred it, first in its strongest directions. Several local steps on the
same batch are unrolled (`unrolled_features`). Behind noise that leaves the row space to be seen,
all of the head's gradient is fitted together (`_joint_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import FeatureAttack, FeatureSolver
from fedsim_attacks.head_features import _joint_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._joint_fit import JointSolver
from fedsim_attacks.head_features.activation_features import Peeling
from fedsim_attacks.head_features.head_fit import (
    ITERATIONS,
    CoarseToFine,
    OutputFit,
    OutputSolver,
    random_starts,
)
from fedsim_attacks.head_features.spectral_features import span
from fedsim_attacks.head_features.unrolled_features import UnrolledSolver

_EXACT = 1e-3  # share of ∂L/∂A left unexplained up to which peeling counts as the whole answer
_COARSE = 8
"""Directions an image in which features are first sought where pruning has blurred the row space:
64 of 8 images hold all but 0.004 behind pruning of 0.7, at an eighth of the time."""
_TOLERANCES = ((1e-5, 1e-3), (1e-3, 3e-2))
"""Pairs (`tolerance`, `consistency`) of `Peeling`, for one gradient and for several steps."""


@dataclass(kw_only=True)
class _Best(FeatureSolver):
    """Runs the solver that suits the observation, and keeps the peeling if that explains more."""

    solver: FeatureSolver | None
    """Solver of what peeling leaves open; None where peeling is the whole answer."""
    peeling: Peeling | None
    """Peeling to compare with; None where nothing was peeled or the solver alone is trusted."""

    @property
    def finished(self) -> bool:
        return self.solver is None or self.solver.finished

    def improve(self) -> None:
        assert self.solver is not None
        self.solver.improve()
        self.loss, self.iteration = self.solver.misfit, self.solver.iteration

    def reconstruction(self) -> Reconstruction:
        best, loss = self.solver, float(self.loss)
        if self.peeling is not None and float(self.peeling.loss) <= loss:
            best, loss = self.peeling, float(self.peeling.loss)
        assert best is not None
        features = best.reconstruction().features
        return Reconstruction(features=features, loss=loss, iterations=self.iteration)


@final
class BestFeatures(FeatureAttack[_Best]):
    """Recovers features: peels off what is exact, fits the rest, and keeps what explains most."""

    paper: ClassVar[str] = (
        "fedsim: activation_features, head_fit and unrolled_features, chosen by consistency"
    )

    iterations: Annotated[int, Field(ge=100)] = 1500
    """Iterations of the fit, or of each trial over several steps; it mostly ends earlier."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Number of random starts of the fit, and as many more if these lead astray."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Number of fits over several local steps, as in unrolled_features."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> _Best:
        """Peels, and chooses a solver; AttackFailed without the gradient of a two-layer head."""
        head = HeadGradient.read(observation)
        peeling = _peel(head)
        loss = torch.full((), torch.inf) if peeling is None else peeling.loss
        if peeling is not None and (float(loss) <= _EXACT or head.dropout):
            # Under dropout its rows are as exact, and ∂L/∂A shows nothing more.
            return _Best(loss=loss, solver=None, peeling=peeling)
        solver: FeatureSolver
        # Over several steps each image has several features, of which unrolling wants the first.
        if head.steps > 1 and head.exact:
            solver = UnrolledSolver(head, self.iterations, self.trials, rng)
            return _Best(loss=loss, solver=solver, peeling=None)
        if _joint_fit.joint_fit_applies(head):
            solver = JointSolver(head, self.starts, self.total(), rng)
        else:
            solver = self._fit(head, peeling, rng)
        return _Best(loss=loss, solver=solver, peeling=peeling)

    def total(self) -> int:
        """Returns the number of iterations of the fit. See `Attack.total`."""
        return self.iterations + ITERATIONS * (self.starts - 1)

    def _fit(
        self, head: HeadGradient, peeling: Peeling | None, rng: torch.Generator
    ) -> FeatureSolver:
        """Prepares a fit of ∂L/∂A from what was peeled and random features for the rest."""
        known = head.hidden[:0] if peeling is None else peeling.features.to(head.hidden.dtype)
        # An exact row space holds the features; a blurred one nearly, in some more directions.
        count = head.rank if head.exact else _COARSE * max(head.rank, _COARSE)
        whole = head
        if not head.noisy and 2 * count < head.hidden.shape[1] and head.grad_hidden.any():
            basis = span(head.rows, count)[0].to(known.dtype)
            head, known = head.restrict(basis), known @ basis.T
        starts = list(random_starts(head, 2 * self.starts, rng))
        first, second = starts[: self.starts], starts[self.starts :]
        if len(known):
            # What was peeled is exact: random features stand only for the rest.
            first = [torch.cat([known, start[len(known) :]]) for start in first]
        if head is whole or head.exact:
            return OutputSolver(OutputFit(head, first), self.total(), second)
        coarse = OutputFit(head, first, splitting=False, all_neurons=True)
        return CoarseToFine(whole, coarse, self.total(), [head.lift(start) for start in second])


def _peel(head: HeadGradient) -> Peeling | None:
    """Peels with the tolerance that explains most; None if there are no exact rows to peel."""
    if head.noisy or head.pruned or not head.config.planted or head.config.activation != "relu":
        return None
    tried = []
    for tolerance, consistency in _TOLERANCES:
        try:
            peeling = Peeling(head, tolerance, consistency)
        except AttackFailed:
            return None
        while not peeling.finished:
            peeling.improve()
        tried.append(peeling)
        if float(peeling.loss) < _EXACT:
            break
    return min(tried, key=lambda peeling: float(peeling.loss))
