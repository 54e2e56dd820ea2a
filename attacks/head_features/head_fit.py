"""Features by fitting the observed ∂L/∂A = D σ(X W' + b) of a two-layer head.

What pruning has left of ∂L/∂W corrects near features (`_fit_rows`): ∂L/∂w_j = Σ_i s_ij σ'(w_j'x_i +
b_j) x_i is linear in them once the signals s = A'D and the neurons that each image activates are
known. Rows of neurons near their threshold are left out, and entries that do not fit count little
(reweighted least squares: Holland and Welsch, Communications in Statistics 6, 1977).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, final

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import FeatureAttack, FeatureSolver
from fedsim_attacks.head_features._head_gradient import HeadGradient, Objective, find_norms
from fedsim_attacks.head_features.spectral_features import eigenvectors, span

ITERATIONS = 20
"""Iterations of one run, after which a fit decides how to go on."""
_MEMORY = 30  # steps that are remembered, over several runs


def lbfgs(variable: Tensor) -> torch.optim.LBFGS:
    """Makes an L-BFGS optimizer of leaf tensor `variable`, with 20 iterations a step at most."""
    return torch.optim.LBFGS(
        [variable],
        max_iter=ITERATIONS,
        max_eval=2 * ITERATIONS,
        history_size=_MEMORY,
        tolerance_grad=1e-12,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )


_SPREAD = 0.5  # distance of starting features from their common direction, over its length


def random_starts(head: HeadGradient, count: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yields `count` guesses of features (N, d): a common direction plus one of the likely span.

    `rng` is on the CPU; N images and d dimensions are those of `head`.
    """
    # Stein's lemma: the mean of ∂L/∂A_kj w_j is in proportion to Σ_i D_ki x_i.
    weights, outer = head.hidden[head.planted], head.grad_output[:, head.planted]
    # Σ_j ∂L/∂A_kj has the sign of Σ_i D_ki: multiplied by it, all classes' sums have one sign.
    moments = outer @ weights / len(weights) * outer.sum(1, keepdim=True).sign()
    likely = torch.linalg.svd(moments, full_matrices=False)[2][: min(head.rank, len(moments) - 1)]
    if len(likely) < head.rank:
        more = span(head.rows, head.rank)[0].to(likely.dtype)
        more = more - (more @ likely.T) @ likely
        extra = torch.linalg.svd(more, full_matrices=False)[2][: head.rank - len(likely)]
        likely = torch.cat([likely, extra])
    common = F.normalize(moments.sum(0), dim=0)
    # At this length the planted neurons' inputs w'x have a variance of 1.
    unit = 1 / weights.std()
    for _ in range(count):
        mix = torch.randn(head.num_images, len(likely), generator=rng).to(likely)
        yield unit * F.normalize(common + _SPREAD * F.normalize(mix @ likely, dim=1), dim=1)


_ENTRIES = 4  # entries left of ∂L/∂W for each unknown, from which they can tell features
_REWEIGHTED = 3  # rounds of reweighting
_UNSURE = 0.1  # distance from its threshold, in deviations, within which a neuron is not used
_OUTLIER = 2.0  # residual, in units of the mean one, at which an entry counts half
_ROW_RIDGE = 1e-5  # ridge towards the present features, over the mean diagonal of the Gram matrix


def _rows_unexplained(head: HeadGradient, features: Tensor, errors: Tensor) -> float:
    """Computes the share of the energy of ∂L/∂W's kept entries that `features` do not explain."""
    kept = head.grad_hidden != 0
    missed = (_row_signals(head, features, errors)[0] @ features - head.grad_hidden) * kept
    return float(missed.square().sum() / head.grad_hidden.square().sum())


def _fit_rows(head: HeadGradient, features: Tensor, errors: Tensor) -> Tensor:
    """Corrects near `features` (N, d), in true lengths with `errors` D (K, N), by rows of ∂L/∂W."""
    signals, sure = _row_signals(head, features, errors)
    n = len(features)
    pairs = (signals[:, :, None] * signals[:, None, :]).flatten(1)
    kept = head.grad_hidden != 0
    bound = float(head.grad_hidden[kept].abs().min()) if head.smallest_removed else torch.inf
    # Cauchy weights (Holland and Welsch, 1977) give a misjudged neuron little say.
    for _ in range(_REWEIGHTED):
        predicted = signals @ features
        target = torch.where(kept, head.grad_hidden, predicted.clamp(-bound, bound))
        miss = (predicted - target).abs()
        usual = miss[kept].mean() + torch.finfo(miss.dtype).tiny
        weights = (kept | (miss > 0)) * sure[:, None] / (1 + (miss / (_OUTLIER * usual)).square())
        # Normal equations of all d dimensions at once: each has weights of its own.
        gram = (weights.T @ pairs).view(-1, n, n).double()
        right = ((weights * target).T @ signals).double()
        # What no row tells of a dimension stays as it was.
        ridge = _ROW_RIDGE * gram.diagonal(dim1=1, dim2=2).mean() + torch.finfo(gram.dtype).tiny
        regular = gram + ridge * torch.eye(n).to(gram)
        right = right + ridge * features.T.double()
        features = torch.linalg.solve(regular, right[..., None])[..., 0].T.to(features.dtype)
    return features


def _row_signals(head: HeadGradient, features: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Computes images' coefficients s_ij σ' (m, N) in ∂L/∂W, and a mask (m,) of sure rows."""
    preactivation, active = head.respond(features)
    length = torch.linalg.vector_norm(head.hidden, dim=1)
    size = torch.linalg.vector_norm(features, dim=1, keepdim=True) * length
    # Distance from the threshold in standard deviations of w'x for such a w and x.
    distance = preactivation.abs() / size * head.hidden.shape[1] ** 0.5
    return ((errors.T @ head.output) * active).T, (distance > _UNSURE).all(0)


_HALVES_ALIKE = 0.8  # cosine of two columns of D from which two features may be halves of one
_NEAR = 0.3  # share of neurons, nearest to their threshold, that show if a feature stands for two
_TRIED = 2  # number of features that are tried to split: those where the residual bends most
_DENSE = 32  # dimensions from which a single eigenvector is found faster than all
_STEPS = 10  # iterations for that one: the axis of a split need not be exact
_ANGLES = (0.15, 0.3, 0.5)  # distances by which halves of a feature are set apart, in units of it


def _propose_splits(objective: Objective, features: Tensor) -> Iterator[Tensor]:
    """Yields `features` (n, d) with one removed and another split in two, the likeliest first."""
    for rest in _list_reductions(objective, features):
        bends = sorted(_bends(objective, rest), key=lambda bend: bend[0], reverse=True)
        candidates = [
            candidate
            for _, index, axis in bends[:_TRIED]
            for candidate in _halves(rest, index, axis)
        ]
        yield min(candidates, key=lambda candidate: float(objective(candidate).loss))


def _list_reductions(objective: Objective, features: Tensor) -> list[Tensor]:
    """Lists (n - 1, d) without one of the features, or with the mean of two; least loss first."""
    n = len(features)
    errors = objective(features).errors
    size = torch.linalg.vector_norm(errors, dim=0)
    unit = F.normalize(errors, dim=0)
    alike = unit.T @ unit
    # A split adds a feature, so that one has to go: the least needed, or one of a pair of halves.
    options = [torch.cat([features[:k], features[k + 1 :]]) for k in range(n)]
    for i in range(n):
        for k in range(i):
            if alike[i, k] > _HALVES_ALIKE:
                mean = (size[i] * features[i] + size[k] * features[k]) / (size[i] + size[k])
                others = [index for index in range(n) if index not in (i, k)]
                options.append(torch.cat([features[others], mean[None]]))
    return sorted(options, key=lambda option: float(objective(option).loss))


def _bends(objective: Objective, features: Tensor) -> Iterator[tuple[float, int, Tensor]]:
    """Yields how much the residual bends at each feature, its index, and the direction (d,)."""
    # σ(w'(x + δ)) + σ(w'(x - δ)) - 2 σ(w'x) is largest where w'x is near 0 and w'δ is not.
    head, value = objective.head, objective(features)
    weights, residual = head.hidden[head.planted], value.residual[:, head.planted]
    for index, feature in enumerate(features):
        # Only what the residual has along this feature's own error signal can be its split.
        bend = F.normalize(value.errors[:, index], dim=0) @ residual
        distance = (weights @ feature).abs()
        near = distance < distance.quantile(_NEAR)
        spread = weights[near].T @ (bend[near, None] * weights[near])
        unit = F.normalize(feature, dim=0)
        # Along the feature a split changes its length alone, which D makes up for.
        across = torch.eye(len(unit)).to(unit) - torch.outer(unit, unit)
        strength, axis = _largest(across @ spread @ across)
        yield strength, index, axis


def _largest(matrix: Tensor) -> tuple[float, Tensor]:
    """Approximates the largest eigenvalue of a symmetric matrix, and its vector (d,)."""
    if len(matrix) < _DENSE:
        values, vectors = eigenvectors(matrix)
        return float(values[-1]), vectors[:, -1]
    start = torch.ones(len(matrix), 1).to(matrix)
    values, vectors = torch.lobpcg(matrix, X=start, largest=True, niter=_STEPS)
    return float(values[0]), vectors[:, 0]


def _halves(features: Tensor, index: int, axis: Tensor) -> Iterator[Tensor]:
    feature = features[index]
    others = torch.cat([features[:index], features[index + 1 :]])
    for angle in _ANGLES:
        step = angle * torch.linalg.vector_norm(feature) * axis
        yield torch.cat([others, (feature + step)[None], (feature - step)[None]])


_RUNS = 5  # runs of L-BFGS after which the variables are scaled anew
_EQUATIONS = 10  # equations for each unknown that a subset of the neurons is to have
_WEIGHTS = 1 << 18  # weights of the neurons in a subset; fewer would gain no time
_LITTLE, _POLISH = 0.03, 1e-4
"""Relative gains of a run below which a split is tried, and below which the fit ends."""
_ROWS_GAIN = 0.95  # misfit after a fit of the rows, over that before, up to which it is repeated
_RUNS_BETWEEN = 2  # runs from one fit of the rows to the next
_EXPLAINED = 1e-5  # share left unexplained up to which no image is missing
_SPLIT_GAIN, _NOISY_SPLIT_GAIN = 0.7, 0.9
"""Loss beyond noise after a run of a split, over that before, up to which it is kept; up to
`_PROMISING` it has a second run behind noise, which flattens valleys."""
_PROMISING = 1.5
_FEW = 3  # splits that are tried at a time while a subset of the neurons counts
_STUCK = 1.03  # loss over that which noise leaves, from which a fit is in a local minimum


class OutputFit:
    """Fits features X to ∂L/∂A from several starts, and goes on from the best of them.

    W, b are weights of the head's hidden layer, A those of its output layer, and D the images'
    error signals. The loss is the share of ∂L/∂A's energy that D σ(X W' + b) leaves unexplained.
    """

    def __init__(
        self,
        head: HeadGradient,
        starts: list[Tensor],
        *,
        splitting: bool = True,
        all_neurons: bool = False,
        weights: int = _WEIGHTS,
    ) -> None:
        """Prepares a fit that begins at the best of `starts`; AttackFailed if ∂L/∂A is empty.

        Args:
            head: the observed gradient.
            starts: features (N, d) each; at least one.
            splitting: whether to leave local minima by splitting features.
            all_neurons: whether all neurons count from the start, not a subset.
            weights: least number of entries of W in a subset.
        """
        if not head.grad_output.any():
            raise AttackFailed("nothing is left of ∂L/∂A, which is to be fitted")
        unknowns = starts[0].numel() + len(starts[0]) * len(head.output)
        dimension = head.hidden.shape[1]
        few = head if all_neurons else head.subset(_EQUATIONS * unknowns, weights // dimension)
        rows_left = int((head.grad_hidden != 0).sum())
        self.head, self.untried = head, list(starts)
        self.noise = head.noise
        """Variance of the noise in each entry of ∂L/∂A; 0 without."""
        self.subset = self.objective = Objective(few)
        """`objective` is of the subset, and in the end of all neurons."""
        self.features = starts[0]
        """(N, d): of the best start so far."""
        self.loss = torch.full((), torch.inf, device=head.hidden.device)
        """Share of ∂L/∂A's energy that they leave unexplained (0-d)."""
        self.splitting = splitting and len(starts[0]) > 1
        self.fits_rows = head.pruned and rows_left >= _ENTRIES * head.num_images * dimension
        """Whether what pruning has left of ∂L/∂W may correct the fit."""
        self.descent: _ScaledDescent | None = None
        """The descent that found `features`; None if another is to begin there."""
        self.settled = self.splits_failed = False
        """`settled`: whether the last iterations gained little."""
        self.before_rows: tuple[float, Tensor, Tensor] | None = None
        """`_rows_unexplained`, features and loss before the last fit of the rows."""

    @property
    def all_neurons(self) -> bool:
        """Whether all neurons count by now, and not a subset."""
        return self.objective.head is self.head

    @property
    def noise_floor(self) -> float:
        """Loss that noise alone leaves to the best fit of ∂L/∂A; 0 without noise."""
        unknowns = self.features.numel() + len(self.features) * len(self.head.output)
        return self.objective.noise_floor(self.noise, unknowns)

    @property
    def incomplete(self) -> bool:
        """Whether the loss is more than noise, or rounding, can account for."""
        return float(self.loss) > max(_EXPLAINED, _STUCK * self.noise_floor)

    @property
    def stuck(self) -> bool:
        """Whether a split of features, not tried yet, may leave a local minimum."""
        return self.splitting and not self.splits_failed and self.incomplete

    @property
    def converged(self) -> bool:
        """Whether iterations, splits and fits of the rows of ∂L/∂W no longer improve the fit."""
        return self.all_neurons and self.settled and not self.stuck and not self.fits_rows

    def improve(self, budget: int) -> int:
        """Fits from a start, goes on from the best, or tries splits; returns the iterations made.

        `budget` limits the iterations of splits, and of a fit of the rows of ∂L/∂W.
        """
        if self.untried:
            self._run(_ScaledDescent(self.objective, self.untried.pop(0)))
            return ITERATIONS
        # Where iterations gain little: rows of ∂L/∂W, then splits, then all neurons for a subset.
        if self.settled:
            if self.all_neurons and self.fits_rows and budget >= _RUNS_BETWEEN * ITERATIONS:
                return self._fit_rows()
            if self.stuck:
                return self._try_splits(budget)
            if not self.all_neurons:
                self.objective, self.descent = Objective(self.head), None
                self.loss = self.objective(self.features).loss
                self.settled = self.splits_failed = False
        before = self.loss
        self._run(self.descent or _ScaledDescent(self.objective, self.features))
        # A subset is left early for all neurons, which alone are worth polishing.
        gain = _LITTLE if not self.all_neurons or self.stuck else _POLISH
        self.settled = not bool(self.loss < before * (1 - gain))
        return ITERATIONS

    def _run(self, descent: _ScaledDescent) -> None:
        features, loss = descent.run()
        if loss < self.loss:
            self.features, self.loss, self.descent = features, loss, descent

    def _fit_rows(self) -> int:
        """Fits the rows of ∂L/∂W and descends from there, unless that gained little last time."""
        errors = self.objective(self.features).errors
        factors = find_norms(self.head, self.features, errors)[0]
        features, errors = self.features * factors[:, None], errors / factors
        missed = _rows_unexplained(self.head, features, errors)
        # The last fit of the rows gained too little: back to the features before it.
        if self.before_rows is not None and missed > _ROWS_GAIN * self.before_rows[0]:
            _, self.features, self.loss = self.before_rows
            self.descent, self.fits_rows = None, False
            return 0
        self.before_rows = missed, self.features, self.loss
        self.descent = _ScaledDescent(self.objective, _fit_rows(self.head, features, errors))
        for _ in range(_RUNS_BETWEEN):  # more would lose what the rows have corrected
            self.features, self.loss = self.descent.run()
        return _RUNS_BETWEEN * ITERATIONS

    def _try_splits(self, budget: int) -> int:
        """Tries splits until one gains, or gives them up; returns the iterations that it took."""
        spent, floor = 0, self.noise_floor
        most = budget if self.all_neurons else min(budget, _FEW * ITERATIONS)
        for proposal in _propose_splits(self.subset, self.features):
            if most - spent < ITERATIONS:
                break
            descent = _ScaledDescent(self.objective, proposal)
            features, loss = descent.run()
            spent += ITERATIONS
            if self.noise and loss - floor < _PROMISING * (self.loss - floor):
                features, loss = descent.run()
                spent += ITERATIONS
            gain = _NOISY_SPLIT_GAIN if self.noise else _SPLIT_GAIN
            # Losses count beyond what noise leaves, which no split can lower.
            if loss - floor < gain * (self.loss - floor):
                self.features, self.loss, self.descent = features, loss, descent
                self.settled = False
                return spent
        self.splits_failed = True
        return spent


class _ScaledDescent:
    """Descends by L-BFGS in scaled variables, whose memory lasts over several runs."""

    def __init__(self, objective: Objective, start: Tensor) -> None:
        self._objective = objective
        self._rescale(start)

    def _rescale(self, start: Tensor) -> None:
        self._runs_left = _RUNS
        self._scale = self._objective.scale(self._objective(start), start)
        # In R⁻¹ X the objective curves alike, and L-BFGS need not learn it.
        self._variable = torch.linalg.solve(self._scale, start).requires_grad_()
        self._optimizer = lbfgs(self._variable)

    def run(self) -> tuple[Tensor, Tensor]:
        """Runs 20 iterations at most; returns features (N, d) and their loss (0-d)."""
        if not self._runs_left:
            self._rescale(self._scale @ self._variable.detach())
        self._runs_left -= 1

        def closure() -> Tensor:
            with torch.no_grad():
                value = self._objective(self._scale @ self._variable)
                self._variable.grad = self._scale.T @ value.slope
            return value.loss

        self._optimizer.step(closure)  # type: ignore[no-untyped-call]
        features = self._scale @ self._variable.detach()
        return features, self._objective(features).loss


_ENOUGH = 1e-7  # share of ∂L/∂A's energy left at which nothing more is worth an iteration
_NEARLY = 1e-4  # share that a coarse fit may leave; directions that it lacks are then better added


class OutputSolver(FeatureSolver):
    """Fits ∂L/∂A, and once more from other starts if the first attempt ends in a local minimum.

    Where the head was restricted to a `basis`, features are coordinates in it. Only
    `reconstruction` turns them into features of the model.
    """

    def __init__(
        self, attempt: OutputFit, budget: int, second_starts: Sequence[Tensor] = ()
    ) -> None:
        """Prepares `attempt`, and another fit if there are `second_starts`, features (N, d) each.

        `budget` is the number of iterations of both together, which starts may exceed.
        """
        super().__init__(loss=attempt.loss)
        self.attempt, self.budget, self.second_starts = attempt, budget, list(second_starts)
        self.first: tuple[Tensor, Tensor] | None = None
        """Loss and features of the first attempt, once the second has begun."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be gained, or the budget is spent."""
        ended = self.attempt.converged and not self._trapped
        # Untried starts come first in any case, or the best of them would be missed.
        done = ended or float(self.attempt.loss) < _ENOUGH
        return not self.attempt.untried and (done or self.iteration + ITERATIONS > self.budget)

    @property
    def nearly_finished(self) -> bool:
        """Whether iterations and splits gain little, or less than 0.01% of the energy is left."""
        fit = self.attempt
        settled = fit.settled and not fit.stuck
        return not fit.untried and (settled or float(fit.loss) < _NEARLY)

    @property
    def _trapped(self) -> bool:
        """Whether the attempt is in a local minimum that another one may avoid."""
        return self.attempt.incomplete and bool(self.second_starts)

    def improve(self) -> None:
        """Takes a step of the present attempt, or begins the second; adds to `iteration`."""
        fit = self.attempt
        if fit.converged and self._trapped and not fit.untried:
            self.first = fit.loss, fit.features
            self.attempt = OutputFit(fit.head, self.second_starts, splitting=fit.splitting)
            self.second_starts = []
        self.iteration += self.attempt.improve(self.budget - self.iteration)
        self.loss = self.attempt.loss

    @property
    def best(self) -> tuple[Tensor, Tensor]:
        """Loss (0-d) and features (N, d), not in true lengths, of the better attempt."""
        fit = self.attempt
        if self.first is not None and not (fit.all_neurons and fit.loss < self.first[0]):
            return self.first
        return fit.loss, fit.features

    @property
    def misfit(self) -> Tensor:
        """Relative residual of ∂L/∂A at the best features (0-d): the root of their loss."""
        return self.best[0].sqrt()

    @property
    def errors(self) -> Tensor:
        """Error signals D (K, N) of K classes with which the best features explain ∂L/∂A best."""
        return Objective(self.attempt.head)(self.best[1]).errors

    def scale_features(self) -> Tensor:
        """Returns the best features (N, d), brought to the lengths that ∂L/∂A implies."""
        features = self.best[1]
        return features * find_norms(self.attempt.head, features, self.errors)[0][:, None]

    def reconstruction(self) -> Reconstruction:
        """Returns the best features (N, d), in true lengths, and no labels.

        The loss is the share of ∂L/∂A's energy that they leave unexplained.
        """
        return Reconstruction(
            features=self.attempt.head.lift(self.scale_features()).float(),
            loss=float(self.best[0]),
            iterations=self.iteration,
        )


def fit_output(head: HeadGradient, features: Tensor, budget: int) -> Tensor:
    """Returns features (N, d), in true lengths, that fit ∂L/∂A, descending from `features` (N, d).

    `budget` is the number of iterations. An AttackFailed says that ∂L/∂A is empty.
    """
    fit = OutputFit(head, [features], splitting=False, all_neurons=True)
    solver = OutputSolver(fit, budget)
    while not solver.finished:
        solver.improve()
    return solver.scale_features()


class CoarseToFine(FeatureSolver):
    """Fits ∂L/∂A within a few directions first, then, from there, in all directions."""

    def __init__(
        self, head: HeadGradient, coarse: OutputFit, budget: int, second_starts: list[Tensor]
    ) -> None:
        """Prepares both fits, of which the first one may have half of the iterations.

        Args:
            head: the gradient in all directions.
            coarse: the fit in a few directions, of a gradient that `head` restricts to them.
            budget: iterations of both fits together, at most.
            second_starts: features (N, d) for a second attempt of the fine fit; empty: none.
        """
        super().__init__(loss=coarse.loss)
        self.head, self.budget, self.second_starts = head, budget, second_starts
        self.fit, self.fine = OutputSolver(coarse, budget // 2), False
        """`fit` is the coarse one, and then, if `fine`, the other."""

    @property
    def finished(self) -> bool:
        """Whether the fine fit has begun and ended."""
        return self.fine and self.fit.finished

    def improve(self) -> None:
        """Takes a step of the coarse fit, then of the fine one. See `FeatureSolver.improve`."""
        if not self.fine and (self.fit.nearly_finished or self.fit.finished):
            # On in all directions: with all neurons if a subset would lead away.
            coarse = self.fit.attempt
            start = coarse.head.lift(coarse.features)
            near = float(coarse.loss) < _NEARLY
            fine = OutputFit(self.head, [start], all_neurons=near)
            self.fit = OutputSolver(fine, self.budget, self.second_starts)
            self.fit.iteration, self.fine = self.iteration, True
        self.fit.improve()
        self.iteration, self.loss = self.fit.iteration, self.fit.loss

    @property
    def misfit(self) -> Tensor:
        """Relative residual of ∂L/∂A in the present fit (0-d). See `OutputSolver.misfit`."""
        return self.fit.misfit

    def reconstruction(self) -> Reconstruction:
        """Returns the features (N, d) of the present fit and its loss; labels are not recovered."""
        return self.fit.reconstruction()


@final
class HeadFit(FeatureAttack[OutputSolver]):
    """Fits features to ∂L/∂A, the output weights' gradient in a two-layer head, by L-BFGS.

    It works under noise, pruning and clipping, for any activation. Features have signs and lengths.
    """

    paper: ClassVar[str] = (
        "Variable projection (Golub and Pereyra, 1973) on the gradient of Liu et al., Data "
        "Reconstruction Attacks and Defenses, section 2.1"
    )

    iterations: Annotated[int, Field(ge=ITERATIONS)] = 1500
    """Iterations of L-BFGS, for the best start and its splits; it mostly ends earlier."""
    starts: Annotated[int, Field(ge=1)] = 4
    """Random starts that are tried for 20 iterations, and as many more if all lead astray."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> OutputSolver:
        """Draws random starts; AttackFailed without the gradient of a two-layer head."""
        head = HeadGradient.read(observation)
        starts = list(random_starts(head, 2 * self.starts, rng))
        first, second = starts[: self.starts], starts[self.starts :]
        return OutputSolver(OutputFit(head, first), self.total(), second)

    def total(self) -> int:
        """Returns `iterations` plus those of the starts that are given up, for progress."""
        return self.iterations + ITERATIONS * (self.starts - 1)
