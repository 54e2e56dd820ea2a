"""Features by fitting the observed ∂L/∂A = D σ(X W' + b) of a two-layer head.

For fixed features X the best D is a linear least-squares solution, which leaves a nonlinear problem
in X alone (variable projection: Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973). With Gaussian W
it is a teacher-student problem with N hidden units and far more equations (K m) than unknowns
(N d), so noise averages out. Entries that a defense has set to zero are known to be small: they
take the model's own prediction as long as it is, and else the threshold.

Images of one label have nearly the same column of D, and where their features are alike too, the
fit can end with two of its features between two true ones. From there it is freed by merging the
two and splitting them again along the direction in which the residual bends (the merge and split of
Ueda et al., SMEM Algorithm for Mixture Models, NeurIPS 1998).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.adversary import Attack, AttackFailed, AttackState
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.head_gradient import HeadGradient
from fedsim_attacks.spectral_features import eigenvectors, span

_CHUNK = 20
_MEMORY = 50
"""Steps that L-BFGS remembers, over several runs of 20 iterations."""
_RIDGE = 1e-9
_SPREAD = 0.5
"""Of the starting features around their common direction, in units of it."""
_LITTLE, _POLISH = 0.03, 1e-4
"""Relative gains in 20 iterations below which a split is tried, and below which the fit ends."""
_ENOUGH = 1e-6
"""Share of ∂L/∂A's energy left unexplained at which nothing more is worth an iteration."""
_ALIKE = 0.8
"""Cosine of two columns of D from which their features may have been confused."""
_NEAR = 0.3
"""Share of neurons, those nearest to their threshold, that show whether one feature stands for
two."""


@dataclass(kw_only=True)
class Fit(AttackState):
    """The features of the best start so far; while `waiting`, of those tried out."""

    seen: HeadGradient
    target: Tensor
    """(K, m): the observed ∂L/∂A, with entries that were removed filled in."""
    features: Tensor
    """(N, d)."""
    descent: _Descent | None = None
    """That found them."""
    waiting: list[Tensor] = field(default_factory=list)
    """Starts that have not been tried."""
    settled: bool = False
    """The last iterations gained little."""
    whole: bool = False
    """No split gains anything: what is left is to polish."""


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
    """Random starts that are tried for 20 iterations."""

    def init(self, observation: Observation, knowledge: Knowledge, rng: torch.Generator) -> Fit:
        """Random features around the direction that all have in common.

        Raises:
            AttackFailed: the model has no two-layer head, or nothing is left of ∂L/∂A.
        """
        seen = HeadGradient.of(observation)
        return begin(seen, list(random_starts(seen, self.starts, rng)))

    def step(self, state: Fit) -> Fit:
        """20 iterations of a start or of the best one, or a split of the best one."""
        return improve(state, self.total() - state.iteration)

    def terminate(self, state: Fit) -> bool:
        """After `iterations` of the best start, or where neither step nor split improves it."""
        return finished(state, self.total())

    def postprocess(self, state: Fit) -> Reconstruction:
        """The features at their norms. The loss is the share of ∂L/∂A that they do not explain."""
        return Reconstruction(
            features=scaled(state).float(), loss=float(state.loss), iterations=state.iteration
        )

    def total(self) -> int:
        """`iterations`, and those of the other starts."""
        return budget(self.iterations, self.starts)


def budget(iterations: int, starts: int) -> int:
    """`iterations` of the best of `starts`, and those of the others."""
    return iterations + _CHUNK * (starts - 1)


def begin(seen: HeadGradient, starts: list[Tensor]) -> Fit:
    """The state before any of `starts` (N, d) was tried.

    Raises:
        AttackFailed: nothing is left of ∂L/∂A.
    """
    if not seen.grad_output.any():
        raise AttackFailed("nothing is left of ∂L/∂A, which is to be fitted")
    return Fit(
        seen=seen,
        target=seen.grad_output.clone(),
        features=starts[0],
        waiting=starts,
        loss=torch.full((), torch.inf, device=seen.hidden.device),
    )


def refined(state: Fit, seen: HeadGradient, basis: Tensor) -> Fit:
    """The fit of coordinates in `basis` (r, d), to go on in the d dimensions of `seen`."""
    fit = begin(seen, [state.features @ basis])
    fit.iteration, fit.whole = state.iteration, state.whole
    return fit


def finished(state: Fit, most: int, enough: float = _ENOUGH) -> bool:
    """Whether nothing more is to be gained, less than `enough` is left unexplained, or `most`
    iterations are spent."""
    done = (state.whole and state.settled) or float(state.loss) < enough
    return not state.waiting and (done or state.iteration + _CHUNK > most)


def improve(state: Fit, left: int) -> Fit:
    """20 more iterations of the next start or of the best, or splits within `left` iterations."""
    if state.settled and not state.whole and not state.waiting:
        tried = _try_splits(state, left)
        if tried:
            state.iteration += tried
            return state
    trying = bool(state.waiting)
    before = state.loss
    if trying or state.descent is None:
        descent = _Descent(state.seen, state.waiting.pop(0) if trying else state.features)
    else:
        descent = state.descent
    features, loss = descent.run(state.target)
    if loss < state.loss:
        state.features, state.loss, state.descent = features, loss, descent
    if not trying:
        state.settled = not bool(loss < before * (1 - (_POLISH if state.whole else _LITTLE)))
        if state.seen.pruned:
            state.target = _filled_in(state)
            state.loss = _evaluate(state.seen, state.target, state.features)[0]
    state.iteration += _CHUNK
    return state


def _try_splits(state: Fit, left: int) -> int:
    """Split pairs until one split gains; if none does, polish. The iterations that took."""
    state.whole, state.settled = True, False
    spent = 0
    for proposal in _splits(state):
        if left - spent < _CHUNK:
            break
        descent = _Descent(state.seen, proposal)
        features, loss = descent.run(state.target)
        spent += _CHUNK
        if loss < state.loss * (1 - 1e-3):
            state.features, state.loss, state.descent = features, loss, descent
            state.whole = False
            break
    return spent


def _splits(state: Fit) -> Iterator[Tensor]:
    """(N, d) with one pair of confusable features merged and split again, likeliest pair first."""
    seen, features = state.seen, state.features
    _, _, errors = _evaluate(seen, state.target, features)
    weights = seen.hidden[seen.server]
    size = torch.linalg.vector_norm(errors, dim=0)
    alike = F.normalize(errors, dim=0)
    alike = alike.T @ alike
    pairs = [(float(alike[i, k]), i, k) for i in range(len(features)) for k in range(i)]
    for _, i, k in sorted((pair for pair in pairs if pair[0] > _ALIKE), reverse=True):
        middle = (size[i] * features[i] + size[k] * features[k]) / (size[i] + size[k])
        others = [n for n in range(len(features)) if n not in (i, k)]
        merged = torch.cat([features[others], middle[None]])
        _, _, fit = _evaluate(seen, state.target, merged)
        residual = state.target - fit @ seen.activation(merged @ seen.hidden.T + seen.bias)
        # σ(w'(m + δ)) + σ(w'(m - δ)) - 2 σ(w'm) is largest where w'm is near 0 and w'δ is not.
        bend = F.normalize(fit[:, -1], dim=0) @ residual[:, seen.server]
        distance = (weights @ middle).abs()
        near = distance < distance.quantile(_NEAR)
        spread = weights[near].T @ (bend[near, None] * weights[near])
        unit = F.normalize(middle, dim=0)
        across = torch.eye(len(unit)).to(unit) - torch.outer(unit, unit)
        axis = eigenvectors(across @ spread @ across)[1][:, -1]
        candidates = []
        for angle in (0.15, 0.3, 0.5):
            candidate = features.clone()
            step = angle * torch.linalg.vector_norm(middle) * axis
            candidate[i], candidate[k] = middle + step, middle - step
            candidates.append(candidate)
        yield min(candidates, key=lambda c: float(_evaluate(seen, state.target, c)[0]))


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
    return state.features * norms(state.seen, state.features, error_signals(state))[0][:, None]


def error_signals(state: Fit) -> Tensor:
    """D (K, N) that fits the features best."""
    return _evaluate(state.seen, state.target, state.features)[2]


def norms(seen: HeadGradient, features: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of `features` (n, d) at which they imply `errors` D (K, n), and what is left of them.

    Under ReLU ∂L/∂A determines D_i |x_i| only; but N D_i = softmax(f(x_i)) - y_i, so each norm is
    where that holds best, up to the relative squared difference that is left. Both (n,).
    """
    preactivation = features @ seen.hidden.T
    label = errors.argmin(0)
    wanted = seen.num_images * errors.T

    def cost(factors: Tensor) -> Tensor:
        hidden = seen.activation(factors[:, None] * preactivation + seen.bias)
        implied = (hidden @ seen.output.T).softmax(1) - F.one_hot(label, len(errors))
        # In the units of the implied error, which a far too small or large norm cannot shrink.
        left = wanted / factors[:, None] - implied
        return left.square().sum(1) / implied.square().sum(1)

    best = features.new_ones(len(features))
    left = cost(best)
    if seen.config.activation not in ("relu", "leaky_relu"):
        return best, left  # others are not homogeneous: the fit has the norm
    for decades, points in ((3.0, 241), (0.025, 21)):
        around = best
        for exponent in torch.linspace(-decades, decades, points).tolist():
            factors = around * 10**exponent
            costs = cost(factors)
            best = torch.where(costs < left, factors, best)
            left = torch.minimum(costs, left)
    return best, left


class _Descent:
    """L-BFGS from `start` (N, d), whose memory lasts from one run to the next."""

    def __init__(self, seen: HeadGradient, start: Tensor) -> None:
        self._seen = seen
        self._unit = torch.linalg.vector_norm(start, dim=1).mean()
        self._variable = (start / self._unit).requires_grad_()
        self._optimizer = torch.optim.LBFGS(
            [self._variable],
            max_iter=_CHUNK,
            max_eval=2 * _CHUNK,
            history_size=_MEMORY,
            tolerance_grad=1e-12,
            tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )

    def run(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """20 iterations: features and loss."""

        def closure() -> Tensor:
            with torch.no_grad():
                loss, slope, _ = _evaluate(self._seen, target, self._variable * self._unit)
                self._variable.grad = slope * self._unit
            return loss

        self._optimizer.step(closure)  # type: ignore[no-untyped-call]
        found = self._variable.detach() * self._unit
        return found, _evaluate(self._seen, target, found)[0]


def _evaluate(
    seen: HeadGradient, target: Tensor, features: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Share of `target` that `features` leave unexplained, its gradient in them, and D (K, N)."""
    with torch.enable_grad():
        preactivation = (features @ seen.hidden.T + seen.bias).detach().requires_grad_()
        hidden = seen.activation(preactivation)
    values = hidden.detach()
    gram = (values @ values.T).double()
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    errors = torch.linalg.solve(gram + ridge, (values @ target.T).double()).T.to(target.dtype)
    left = target - errors @ values
    energy = target.square().sum()
    # At the best D the loss depends on the features through the hidden values alone.
    (slope,) = torch.autograd.grad(hidden, preactivation, -2 / energy * (errors.T @ left))
    return left.square().sum() / energy, slope @ seen.hidden, errors


def _filled_in(state: Fit) -> Tensor:
    """The observed ∂L/∂A; removed entries as predicted, but no larger than the smallest kept."""
    seen = state.seen
    kept = seen.grad_output != 0
    threshold = seen.grad_output[kept].abs().min()
    _, _, errors = _evaluate(seen, state.target, state.features)
    predicted = errors @ seen.activation(state.features @ seen.hidden.T + seen.bias)
    return torch.where(kept, seen.grad_output, predicted.clamp(-threshold, threshold))
