"""Features by fitting the observed ∂L/∂A = D σ(X W' + b) of a two-layer head.

The best D for given features X is in closed form (`head_objective`). With Gaussian W the rest is a
teacher-student problem with N hidden units and far more equations (K m) than unknowns (N d), so
noise averages out, and a part of the neurons is enough until the last iterations.

The fit goes down by L-BFGS in variables that curve alike, is freed from local minima by splitting
features (`split_merge`) as long as it leaves more unexplained than noise can account for, and is
told by what pruning has left of ∂L/∂W (`row_fit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackFailed, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.head_features import _row_fit
from fedsim_attacks.head_features._feature_norms import norms
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features._split_merge import moves
from fedsim_attacks.head_features.spectral_features import span

_CHUNK = 20
_MEMORY = 30
"""Steps that L-BFGS remembers, over several runs of 20 iterations."""
_RUNS = 5
"""Of 20 iterations, after which the variables are scaled anew."""
_EQUATIONS = 10
"""For each unknown, of which a part of the neurons is to have that many."""
_WEIGHTS = 1 << 18
"""Of the neurons, from which fewer would gain no time."""
_SPREAD = 0.5
"""Of the starting features around their common direction, in units of it."""
_LITTLE, _POLISH = 0.03, 1e-4
"""Relative gains in 20 iterations below which a split is tried, and below which the fit ends."""
_ENOUGH = 1e-7
"""Share of ∂L/∂A's energy left unexplained at which nothing more is worth an iteration."""
_TOLD = 0.95
"""Part of what of the rows was left, down to which fitting them must get to be repeated."""
_BETWEEN = 2
"""Runs of 20 iterations from one fit of the rows to the next."""
_EXPLAINED = 1e-5
"""Share up to which no image is missing."""
_FREED, _FREED_BEHIND_NOISE = 0.7, 0.9
"""Part of what is left beyond noise, down to which a split must get in 20 iterations; behind noise,
which flattens valleys, in 40 if the first bring it down to `_PROMISING`."""
_PROMISING = 1.5
_FEW = 3
"""Splits that are tried at a time while a part of the neurons counts."""
_STUCK = 1.03
"""Times what noise leaves unexplained by the best fit, from which one is in a local minimum."""


@dataclass(kw_only=True)
class Fit(AttackState):
    """The features of the best start so far; while `waiting`, of those tried out."""

    seen: HeadGradient
    sketch: Objective
    """Of a part of the neurons."""
    objective: Objective
    """The sketch, and in the end that of all neurons."""
    noise: float
    """Variance in each entry of ∂L/∂A."""
    features: Tensor
    """(N, d)."""
    descent: _Descent | None = None
    """That found them."""
    waiting: list[Tensor] = field(default_factory=list)
    """Starts that have not been tried."""
    spare: list[Tensor] = field(default_factory=list)
    """Starts of another go, if this one ends in a local minimum."""
    before: tuple[Tensor, Tensor] | None = None
    """Loss and features of the go before."""
    settled: bool = False
    """The last iterations gained little."""
    splitting: bool = True
    """Whether a split may gain anything."""
    unsplit: bool = False
    """Splits have been tried, in vain."""
    rows: bool = False
    """Whether what pruning has left of ∂L/∂W may tell more."""
    told: tuple[float, Tensor, Tensor] | None = None
    """Before its rows were fitted last: what of them was left, features and loss."""

    @property
    def whole(self) -> bool:
        """Whether all neurons count by now."""
        return self.objective.seen is self.seen

    @property
    def missing(self) -> bool:
        """Whether more is left unexplained than noise can account for."""
        return float(self.loss) > max(_EXPLAINED, _STUCK * self.floor)

    @property
    def floor(self) -> float:
        """What the best fit leaves unexplained, by the noise."""
        unknowns = self.features.numel() + len(self.features) * len(self.seen.output)
        return self.objective.floor(self.noise, unknowns)

    @property
    def stuck(self) -> bool:
        """Whether a split may find what is missing."""
        return self.splitting and not self.unsplit and self.missing

    @property
    def over(self) -> bool:
        """Whether this go is at its end."""
        return self.whole and self.settled and not self.stuck and not self.rows


@final
class HeadFit(Attack[Fit]):
    """Fits ∂L/∂A of a two-layer head by variable projection: L-BFGS over the features.

    It works under noise, pruning and clipping, for any activation. Signs and, through the
    probabilities that the features imply, norms are recovered.
    """

    paper: ClassVar[str] = (
        "Variable projection (Golub and Pereyra, 1973) on the gradient of Liu et al., Data "
        "Reconstruction Attacks and Defenses, section 2.1"
    )

    iterations: Annotated[int, Field(ge=_CHUNK)] = 1500
    """Of L-BFGS, for the best start and its splits; it mostly ends earlier."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Random starts that are tried for 20 iterations, and as many more if all lead astray."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Fit:
        """Random features around the direction that all have in common.

        Raises:
            AttackFailed: the model has no two-layer head, or nothing is left of ∂L/∂A.
        """
        seen = HeadGradient.of(observation)
        starts = list(random_starts(seen, 2 * self.starts, rng))
        return begin(seen, starts[: self.starts], spare=starts[self.starts :])

    def step(self, state: Fit) -> Fit:
        """20 iterations of a start or of the best one, or a split of the best one."""
        return improve(state, self.total() - state.iteration)

    def terminate(self, state: Fit) -> bool:
        """After `iterations` of the best start, or where neither step nor split improves it."""
        return finished(state, self.total())

    def postprocess(self, state: Fit) -> Reconstruction:
        """The features at their norms. The loss is the share of ∂L/∂A that they do not explain."""
        return Reconstruction(
            features=scaled(state).float(),
            loss=float(outcome(state)[0]),
            iterations=state.iteration,
        )

    def total(self) -> int:
        """`iterations`, and those of the other starts."""
        return budget(self.iterations, self.starts)


def budget(iterations: int, starts: int) -> int:
    """`iterations` of the best of `starts`, and those of the others."""
    return iterations + _CHUNK * (starts - 1)


def begin(
    seen: HeadGradient,
    starts: list[Tensor],
    *,
    spare: Sequence[Tensor] = (),
    splitting: bool = True,
    whole: bool = False,
    weights: int = _WEIGHTS,
) -> Fit:
    """The state before any of `starts` (N, d) was tried.

    `spare` are those of another go, if the first ends in a local minimum; without `splitting` there
    are no moves out of one; `whole` uses all neurons from the start, else those of `weights` at
    least.

    Raises:
        AttackFailed: nothing is left of ∂L/∂A.
    """
    if not seen.grad_output.any():
        raise AttackFailed("nothing is left of ∂L/∂A, which is to be fitted")
    unknowns = starts[0].numel() + len(starts[0]) * len(seen.output)
    fewest = weights // seen.hidden.shape[1]
    sketch = Objective(seen if whole else seen.part(_EQUATIONS * unknowns, fewest))
    return Fit(
        seen=seen,
        sketch=sketch,
        objective=sketch,
        noise=seen.noise,
        features=starts[0],
        waiting=starts,
        spare=list(spare),
        splitting=splitting and len(starts[0]) > 1,
        rows=_row_fit.applies(seen),
        loss=torch.full((), torch.inf, device=seen.hidden.device),
    )


def refined(
    state: Fit, seen: HeadGradient, basis: Tensor, good: float, spare: Sequence[Tensor]
) -> Fit:
    """The fit of coordinates in `basis` (r, d), to go on in the d dimensions of `seen`.

    With all neurons at once if it has left less than `good`: a part would lead away from it.
    """
    whole = float(state.loss) < good
    fit = begin(seen, [state.features @ basis], spare=spare, whole=whole)
    fit.iteration = state.iteration
    return fit


def finished(state: Fit, most: int) -> bool:
    """Whether nothing more is to be gained, or `most` iterations are spent."""
    ended = state.over and not (state.missing and state.spare)
    done = ended or float(state.loss) < _ENOUGH
    return not state.waiting and (done or state.iteration + _CHUNK > most)


def rough(state: Fit, enough: float) -> bool:
    """Whether neither iterations nor splits gain much by now, or less than `enough` is left."""
    settled = state.settled and not state.stuck
    return not state.waiting and (settled or float(state.loss) < enough)


def improve(state: Fit, left: int) -> Fit:
    """20 more iterations of the next start or of the best, or splits within `left` iterations."""
    if state.over and state.missing and state.spare and not state.waiting:
        state = _again(state)
    trying = bool(state.waiting)
    if state.settled and not trying:
        if state.whole and state.rows and left >= _BETWEEN * _CHUNK:
            state.iteration += _fit_rows(state)
            return state
        if state.stuck:
            state.iteration += _try_splits(state, left)
            return state
        if not state.whole:
            state.objective, state.descent = Objective(state.seen), None
            state.loss = state.objective(state.features).loss
            state.settled = state.unsplit = False
    before = state.loss
    if trying or state.descent is None:
        start = state.waiting.pop(0) if trying else state.features
        descent = _Descent(state.objective, start)
    else:
        descent = state.descent
    features, loss = descent.run()
    if loss < state.loss:
        state.features, state.loss, state.descent = features, loss, descent
    if not trying:
        gain = _LITTLE if not state.whole or state.stuck else _POLISH
        state.settled = not bool(loss < before * (1 - gain))
    state.iteration += _CHUNK
    return state


def _again(state: Fit) -> Fit:
    """From the spare starts."""
    fit = begin(state.seen, state.spare, splitting=state.splitting)
    fit.iteration, fit.before = state.iteration, (state.loss, state.features)
    return fit


def outcome(state: Fit) -> tuple[Tensor, Tensor]:
    """Loss and features of the better go."""
    if state.before is not None and not (state.whole and state.loss < state.before[0]):
        return state.before
    return state.loss, state.features


def _fit_rows(state: Fit) -> int:
    """Fit the rows of ∂L/∂W and go down from there, as long as it gains. The iterations."""
    errors = state.objective(state.features).errors
    factors = norms(state.seen, state.features, errors)[0]
    features, errors = state.features * factors[:, None], errors / factors
    left = _row_fit.left(state.seen, features, errors)
    if state.told is not None and left > _TOLD * state.told[0]:
        _, state.features, state.loss = state.told
        state.descent, state.rows = None, False
        return 0
    state.told = left, state.features, state.loss
    state.descent = _Descent(state.objective, _row_fit.improved(state.seen, features, errors))
    for _ in range(_BETWEEN):  # more would lose what the rows have told
        state.features, state.loss = state.descent.run()
    return _BETWEEN * _CHUNK


def _try_splits(state: Fit, left: int) -> int:
    """Try moves until one gains; if none does, none is tried again. The iterations."""
    spent, floor = 0, state.floor
    most = left if state.whole else min(left, _FEW * _CHUNK)
    for proposal in moves(state.sketch, state.features):
        if most - spent < _CHUNK:
            break
        descent = _Descent(state.objective, proposal)
        features, loss = descent.run()
        spent += _CHUNK
        if state.noise and loss - floor < _PROMISING * (state.loss - floor):
            features, loss = descent.run()
            spent += _CHUNK
        freed = _FREED_BEHIND_NOISE if state.noise else _FREED
        if loss - floor < freed * (state.loss - floor):
            state.features, state.loss, state.descent = features, loss, descent
            state.settled = False
            return spent
    state.unsplit = True
    return spent


def descended(seen: HeadGradient, features: Tensor, most: int) -> Tensor:
    """Features (N, d) that explain ∂L/∂A best, within `most` iterations from `features`."""
    fit = begin(seen, [features], splitting=False, whole=True)
    while not finished(fit, most):
        fit = improve(fit, most - fit.iteration)
    return scaled(fit)


def random_starts(seen: HeadGradient, count: int, rng: torch.Generator) -> Iterator[Tensor]:
    """`count` starts (N, d): the common direction plus a random one in the features' likely span.

    By Stein's lemma the mean of ∂L/∂A_kj w_j over the planted neurons is in proportion to
    Σ_i D_ki x_i, a sum with one sign for a class that is not in the batch.
    """
    weights, outer = seen.hidden[seen.server], seen.grad_output[:, seen.server]
    moments = outer @ weights / len(weights) * outer.sum(1, keepdim=True).sign()
    likely = torch.linalg.svd(moments, full_matrices=False)[2][: min(seen.rank, len(moments) - 1)]
    if len(likely) < seen.rank:
        more = span(seen.rows, seen.rank)[0].to(likely.dtype)
        more = more - (more @ likely.T) @ likely
        extra = torch.linalg.svd(more, full_matrices=False)[2][: seen.rank - len(likely)]
        likely = torch.cat([likely, extra])
    common = F.normalize(moments.sum(0), dim=0)
    unit = 1 / weights.std()
    for _ in range(count):
        mix = torch.randn(seen.num_images, len(likely), generator=rng).to(likely)
        yield unit * F.normalize(common + _SPREAD * F.normalize(mix @ likely, dim=1), dim=1)


def scaled(state: Fit) -> Tensor:
    """The features (N, d) at the norms at which they explain their own error signals."""
    features = outcome(state)[1]
    return features * norms(state.seen, features, error_signals(state))[0][:, None]


def error_signals(state: Fit) -> Tensor:
    """D (K, N) that fits the features best."""
    return Objective(state.seen)(outcome(state)[1]).errors


class _Descent:
    """L-BFGS from `start` (N, d) in scaled variables, whose memory lasts over several runs."""

    def __init__(self, objective: Objective, start: Tensor) -> None:
        self._objective = objective
        self._begin(start)

    def _begin(self, start: Tensor) -> None:
        self._left = _RUNS
        self._scale = self._objective.scale(self._objective(start), start)
        self._variable = torch.linalg.solve(self._scale, start).requires_grad_()
        self._optimizer = torch.optim.LBFGS(
            [self._variable],
            max_iter=_CHUNK,
            max_eval=2 * _CHUNK,
            history_size=_MEMORY,
            tolerance_grad=1e-12,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

    def run(self) -> tuple[Tensor, Tensor]:
        """20 iterations: features and loss."""
        if not self._left:
            self._begin(self._scale @ self._variable.detach())
        self._left -= 1

        def closure() -> Tensor:
            with torch.no_grad():
                value = self._objective(self._scale @ self._variable)
                self._variable.grad = self._scale.T @ value.slope
            return value.loss

        self._optimizer.step(closure)  # type: ignore[no-untyped-call]
        found = self._scale @ self._variable.detach()
        return found, self._objective(found).loss
