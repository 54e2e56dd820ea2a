"""The strongest feature attack for what was observed, chosen by the attacker's own consistency.

What the attacker can check is whether features reproduce the observed ∂L/∂A. Exact rows are peeled
(`activation_features`). What that leaves open, or a defense has disturbed, is fitted (`head_fit`)
from the features that peeling did find; where the row space is exact, in its coordinates, and where
pruning or rounding has blurred it, first in its strongest directions. Several local steps on the
same batch are unrolled (`unrolled_features`). Behind noise that leaves the row space to be seen,
all of the head's gradient is fitted together (`joint_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.head_features import (
    _joint_fit,
    activation_features,
    head_fit,
    unrolled_features,
)
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._joint_fit import Joint
from fedsim_attacks.head_features.activation_features import Peeling
from fedsim_attacks.head_features.head_fit import Fit
from fedsim_attacks.head_features.spectral_features import span
from fedsim_attacks.head_features.unrolled_features import Unrolling

_EXACT = 1e-3
"""Share of ∂L/∂A left unexplained up to which peeling counts as the whole answer."""
_COARSE = 8
"""Directions an image, of the rows' strongest, in which features are first sought where pruning or
rounding has blurred the row space: 64 of 8 images hold all but 0.004 of them behind pruning of 0.7,
and an iteration in them takes an eighth of the time."""
_GOOD = 1e-4
"""Share of ∂L/∂A's energy that these directions may leave; the others are then better added."""
_TOLERANCES = ((1e-5, 1e-3), (1e-3, 3e-2))
"""(equal rows, one image's ∂L/∂A): of exact gradients, and of several small steps."""


@dataclass(kw_only=True)
class Best(AttackState):
    """The peeling, and what follows unless it explains everything."""

    peeling: Peeling | None
    then: Fit | Joint | Unrolling | None = None
    basis: Tensor | None = None
    """(r, d): of the row space, where the fit is in its coordinates."""
    refine: HeadGradient | None = None
    """In whose d dimensions the fit is to go on from there."""
    spare: list[Tensor] = field(default_factory=list)
    """Starts of another go in those."""


@final
class BestFeatures(Attack[Best]):
    """Peels off what is exact, fits the rest, and keeps what reproduces the observation best."""

    paper: ClassVar[str] = (
        "fedsim: activation_features, head_fit and unrolled_features, chosen by consistency"
    )

    iterations: Annotated[int, Field(ge=100)] = 1500
    """Of the fit, or of each trial of the unrolling; it mostly ends earlier."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Of the fit, and as many more if these lead astray."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Of the unrolling."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Best:
        """Peel, where rows can be exact.

        Raises:
            AttackFailed: the model has no two-layer head.
        """
        seen = HeadGradient.of(observation)
        exact = seen.config.planted and seen.config.activation == "relu"
        peeling = self._peel(seen) if exact and not seen.noisy and not seen.pruned else None
        loss = torch.full((), torch.inf) if peeling is None else peeling.loss
        state = Best(loss=loss, peeling=peeling)
        if peeling is not None and (float(loss) <= _EXACT or seen.dropped):
            return state  # under dropout its rows are as exact, and ∂L/∂A shows nothing more
        if seen.steps > 1 and seen.exact:
            state.then = unrolled_features.begin(seen, rng)
            return state
        if _joint_fit.applies(seen):
            state.then = _joint_fit.begin(seen, self.starts, rng)
            return state
        known = seen.hidden[:0]
        if peeling is not None:
            known = activation_features.features(peeling.shares).to(known.dtype)
        directions = seen.rank if seen.exact else _COARSE * max(seen.rank, _COARSE)
        if not seen.noisy and 2 * directions < seen.hidden.shape[1] and seen.grad_hidden.any():
            state.basis = span(seen.rows, directions)[0].to(known.dtype)
            state.refine = None if seen.exact else seen
            seen, known = seen.within(state.basis), known @ state.basis.T
        starts = list(head_fit.random_starts(seen, 2 * self.starts, rng))
        starts, spare = starts[: self.starts], starts[self.starts :]
        if len(known):
            starts = [torch.cat([known, start[len(known) :]]) for start in starts]
        if state.refine is None:
            state.then = head_fit.begin(seen, starts, spare=spare)
        else:
            assert state.basis is not None
            state.spare = [start @ state.basis for start in spare]
            state.then = head_fit.begin(seen, starts, splitting=False, whole=True)
        return state

    def step(self, state: Best) -> Best:
        """20 iterations of the fit or the unrolling, or a split."""
        if isinstance(state.then, Unrolling):
            state.then = unrolled_features.improve(state.then, self.iterations)
            state.loss = state.then.loss
        elif isinstance(state.then, Joint):
            state.then = _joint_fit.improve(state.then, self.total())
            state.loss = state.then.loss
        elif state.then is not None:
            most = self.total()
            if state.refine is not None:
                most //= 2  # the other half is for all dimensions
                if head_fit.rough(state.then, _GOOD) or head_fit.finished(state.then, most):
                    assert state.basis is not None
                    state.then = head_fit.refined(
                        state.then, state.refine, state.basis, _GOOD, state.spare
                    )
                    state.basis = state.refine = None
                    most = self.total()
            state.then = head_fit.improve(state.then, most - state.iteration)
            state.loss = head_fit.outcome(state.then)[0].sqrt()
        if state.then is not None:
            state.iteration = state.then.iteration
        return state

    def terminate(self, state: Best) -> bool:
        """Peeling explains everything, or the fit or the unrolling is done."""
        if isinstance(state.then, Unrolling):
            return unrolled_features.finished(state.then, self.trials)
        if isinstance(state.then, Joint):
            return state.then.over
        spent = state.then is None or head_fit.finished(state.then, self.total())
        return spent and state.refine is None

    def postprocess(self, state: Best) -> Reconstruction:
        """The unrolled features; else those that leave less of ∂L/∂A unexplained."""
        peeling, then = state.peeling, state.then
        loss = float(state.loss)
        if isinstance(then, Unrolling):
            found = unrolled_features.found(then)
        elif isinstance(then, Joint):
            assert then.features is not None
            found = then.features
        elif then is None or (peeling is not None and float(peeling.loss) <= loss):
            assert peeling is not None
            found, loss = activation_features.filled_up(peeling), float(peeling.loss)
        else:
            found = head_fit.scaled(then)
            found = found if state.basis is None else found @ state.basis
        return Reconstruction(features=found.float(), loss=loss, iterations=state.iteration)

    def total(self) -> int:
        """Of the fit."""
        return head_fit.budget(self.iterations, self.starts)

    def _peel(self, seen: HeadGradient) -> Peeling | None:
        """With the tolerance that explains most; None if a defense has left nothing to peel."""
        tried = []
        for tolerance, consistency in _TOLERANCES:
            try:
                peeling = activation_features.start(seen)
            except AttackFailed:
                return None
            while not peeling.stuck and len(peeling.shares) < seen.num_images:
                peeling = activation_features.peel(peeling, tolerance, consistency)
            tried.append(peeling)
            if float(peeling.loss) < _EXACT:
                break
        return min(tried, key=lambda peeling: float(peeling.loss))
