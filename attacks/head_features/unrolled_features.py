"""Features of the first of several local steps on the same batch.

A client's steps move its features: image i has x_i^(1), ..., x_i^(E), which may differ widely, and
the update is, up to the head's own small motion, the gradient of a batch of N E images. Two facts
make that batch tractable:

- each step's ∂L/∂W has rows in the span of that step's features, so the row space of the whole
  update holds all of them: N E coordinates in it replace d;
- the head before the first step is known, and so is the error signal that a feature of that step
  must have, N D = softmax(f(x)) - y. Features of later steps met a head that had moved.

So ∂L/∂A is fitted first with N features, and then, each spread into E, with N E of them; the N that
the first head explains are those of the first step. How well it explains them tells the attacker
whether the fit has found them: if not, it hops on from the best fit so far (Wales and Doye, Global
Optimization by Basin-Hopping, 1997).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.head_features import head_fit
from fedsim_attacks.head_features._feature_norms import norms
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.head_fit import Fit
from fedsim_attacks.head_features.spectral_features import span

_STARTS = 4
_WEIGHTS = 1 << 16
"""Of the neurons that a fit starts with: it is tried again if that was too few."""
_SPREAD = 0.5
"""Of an image's features over the steps when they start, in units of their common one."""
_HOPS = (0.6, 0.3)
"""How far features are moved for the next trial, in units of themselves, in turns."""
_EXPLAINED = 0.04
"""What is left of an error signal up to which the first head counts as explaining it."""
_SAME = 0.98
"""Cosine from which two features of one label count as one."""
_ALIKE = 4.0
"""Times the usual length, or a part of it, within which a feature's length is plausible."""
_MOVED, _NEARLY_MOVED = 2e-3, 2e-2
"""Part of ∂L/∂A that one feature an image leaves unexplained, from which features have moved, and
from which that feature is of no use."""


@dataclass(kw_only=True)
class Unrolling(AttackState):
    """The trial under way, the best fit, and the best features of the first step so far."""

    seen: HeadGradient
    """In coordinates of the row space."""
    basis: Tensor
    """(N E, d): of the row space."""
    rng: torch.Generator
    moving: bool
    """Whether features differ from step to step; where not, all steps are one."""
    fit: Fit
    spread: bool = False
    """Whether `fit` has a feature for each step."""
    best: Tensor
    """(N, N E)."""
    common: Tensor | None = None
    """(N, N E), if one feature an image nearly fits all steps."""
    lowest: Fit
    """The trial that explains most of ∂L/∂A, from which the next one hops."""
    ended: int = 0
    """Trials."""


@final
class UnrolledFeatures(Attack[Unrolling]):
    """Fits the features of all local steps in the update's row space, and tells the first step's.

    It needs an exact row space: no noise, pruning or quantization. Its own loss is the largest
    part of a found feature's error signal that the head before the first step does not imply; if
    no feature has moved, the part of ∂L/∂A that they do not explain.
    """

    paper: ClassVar[str] = (
        "fedsim: variable projection (Golub and Pereyra, 1973) over all steps of Liu et al.'s "
        "local aggregation, section 3"
    )

    iterations: Annotated[int, Field(ge=100)] = 1500
    """Of L-BFGS in each trial; it mostly ends earlier."""
    trials: Annotated[int, Field(ge=1)] = 16
    """Fits, until one is consistent."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Unrolling:
        """The row space, and random starts in it.

        Raises:
            AttackFailed: the model has no two-layer head, or a defense has left no exact rows.
        """
        return begin(HeadGradient.of(observation), rng)

    def step(self, state: Unrolling) -> Unrolling:
        """20 iterations of the trial under way, or its end."""
        return improve(state, self.iterations)

    def terminate(self, state: Unrolling) -> bool:
        """A trial is consistent, or all are over."""
        return finished(state, self.trials)

    def postprocess(self, state: Unrolling) -> Reconstruction:
        """The features of the first step, at the norms that the first head implies."""
        return Reconstruction(
            features=found(state).float(), loss=float(state.loss), iterations=state.iteration
        )

    def total(self) -> int:
        """Of all trials."""
        return self.iterations * (1 + self.trials)


def begin(seen: HeadGradient, rng: torch.Generator) -> Unrolling:
    """The state before the first trial.

    Raises:
        AttackFailed: the rows of ∂L/∂W are not exact, or nothing is left of ∂L/∂W or ∂L/∂A.
    """
    if not seen.exact:
        raise AttackFailed(
            "noise, pruning or quantization has left no exact row space to unroll steps in: use "
            "head_fit"
        )
    if not seen.grad_hidden.any():
        raise AttackFailed("nothing is left of ∂L/∂W, whose rows hold the features of all steps")
    size = min(seen.num_images * seen.steps, seen.hidden.shape[1])
    basis = span(seen.grad_hidden, size)[0].to(seen.hidden.dtype)
    inside = seen.within(basis)
    starts = list(head_fit.random_starts(inside, _STARTS, rng))
    fit = head_fit.begin(inside, starts, weights=_WEIGHTS)
    return Unrolling(
        loss=torch.full((), torch.inf, device=basis.device),
        seen=inside,
        basis=basis,
        rng=rng,
        moving=seen.steps > 1,
        fit=fit,
        lowest=fit,
        best=fit.features,
    )


def improve(state: Unrolling, most: int) -> Unrolling:
    """20 more iterations of at most `most`, or the end of a fit."""
    fit = state.fit
    if not head_fit.finished(fit, most):
        before = fit.iteration
        state.fit = head_fit.improve(fit, most - before)
        state.iteration += state.fit.iteration - before
    elif state.moving and not state.spread:
        _spread(state)
    else:
        _end_trial(state)
    return state


def finished(state: Unrolling, trials: int) -> bool:
    """Whether the first step's features are explained, or `trials` have ended."""
    return float(state.loss) < _EXPLAINED or state.ended >= (trials if state.moving else 1)


def found(state: Unrolling) -> Tensor:
    """(N, d): the features of the first step, at their norms.

    Where little has moved the steps may not be told apart, and need not be: if no trial was
    consistent, but one feature an image nearly fits all steps, it is those.
    """
    apart = state.common is None or state.loss < _EXPLAINED
    return (state.best if apart else state.common) @ state.basis


def _spread(state: Unrolling) -> None:
    """Give every image a feature for each step, unless one explains them all."""
    fit = state.fit
    if fit.loss.sqrt() < _MOVED:
        state.moving = False
        return
    if fit.loss.sqrt() < _NEARLY_MOVED:
        state.common = _explained(state, fit, head_fit.error_signals(fit))[0]
    copies = fit.features.repeat(state.seen.steps, 1)
    state.fit, state.spread = _moved(state, copies, _SPREAD), True


def _moved(state: Unrolling, features: Tensor, by: float) -> Fit:
    """A fit that starts at `features`, moved at random `by` their length."""
    noise = torch.randn(features.shape, generator=state.rng).to(features)
    unit = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    start = features + by * unit * F.normalize(noise, dim=1)
    # An image's features are alike: they are not to be merged.
    return head_fit.begin(state.seen, [start], splitting=False, weights=_WEIGHTS)


def _end_trial(state: Unrolling) -> None:
    """Keep its features of the first step if the first head explains them better; hop on."""
    fit, errors = state.fit, head_fit.error_signals(state.fit)
    features, loss = _explained(state, fit, errors / state.seen.first)
    if not state.moving:  # errors may have stayed, or have vanished after the first step
        stayed, left = _explained(state, fit, errors)
        features, loss = stayed if left < loss else features, fit.loss.sqrt()
    if loss < state.loss:
        state.best, state.loss = features, loss
    if not state.ended or fit.loss < state.lowest.loss:
        state.lowest = fit
    state.fit = _moved(state, state.lowest.features, _HOPS[state.ended % len(_HOPS)])
    state.ended += 1


def _explained(state: Unrolling, fit: Fit, errors: Tensor) -> tuple[Tensor, Tensor]:
    """The N features whose error signals the first head explains best, at their norms.

    And the part of the worst of those signals that it does not explain.
    """
    factors, left = norms(state.seen, fit.features, errors)
    length = factors * torch.linalg.vector_norm(fit.features, dim=1)
    # An error signal of one label alone is explained by almost any feature that is long enough, and
    # one of a doubtful head by any that is short enough.
    left = left + _absurd(length, left, state.seen.num_images)
    order = _distinct(fit.features, errors, left)[: state.seen.num_images]
    return fit.features[order] * factors[order, None], left[order].max().sqrt()


def _absurd(length: Tensor, left: Tensor, count: int) -> Tensor:
    """(n,) 1, as no feature at all would leave, where lengths are unlike those of the others.

    These are the `count` that are explained best and are alike themselves; `left` is of all.
    """
    apart = (length[:, None] / length).log().abs() > math.log(_ALIKE)
    worst = (left + apart.to(left)).sort(dim=1).values[:, min(count, len(left)) - 1]
    return apart[worst.argmin()].to(left)


def _distinct(features: Tensor, errors: Tensor, left: Tensor) -> Tensor:
    """Indices by what is `left`, least first, and those of features that come again last.

    A feature may be found in parts, of nearly one direction and one label, each of them explained.
    """
    label = errors.argmin(0)
    alike = F.normalize(features, dim=1) @ F.normalize(features, dim=1).T > _SAME
    alike &= label[:, None] == label
    order = left.argsort().tolist()
    again = [i for at, i in enumerate(order) if alike[i, order[:at]].any()]
    return torch.tensor([i for i in order if i not in again] + again, device=left.device)
