"""A fit of features to the observed ∂L/∂A = D σ(X W' + b) of a two-layer head.

The best D for given features X is in closed form (`head_objective`). With Gaussian W the rest is a
teacher-student problem with N hidden units and far more equations (K m) than unknowns (N d), so
noise averages out, and a subset of the neurons is enough until the last iterations.

The fit descends by L-BFGS in variables that curve alike. Where it leaves more unexplained than
noise can account for, it splits features to leave the local minimum (`moves`). What pruning
has left of ∂L/∂W corrects it (`row_fit`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim_attacks.head_features import _row_fit
from fedsim_attacks.head_features._head_gradient import HeadGradient, norms
from fedsim_attacks.head_features._head_objective import Objective
from fedsim_attacks.head_features._lbfgs import ITERATIONS, lbfgs
from fedsim_attacks.head_features.spectral_features import eigenvectors

_ALIKE = 0.8
"""Cosine of two columns of D from which two features may be halves of one."""
_NEAR = 0.3
"""Share of neurons, those nearest to their threshold, that show whether one feature stands for
two."""
_TRIED = 2
"""Features that are tried to split, those that bend most."""
_DENSE = 32
"""Dimensions from which a single eigenvector is found faster than all."""
_STEPS = 10
"""For that one: the axis of a split need not be exact."""
_ANGLES = (0.15, 0.3, 0.5)
"""By which the halves of a feature are set apart, in units of it."""


def moves(objective: Objective, features: Tensor) -> Iterator[Tensor]:
    """Yields features (n, d) with one removed and another one split, likeliest first."""
    for rest in _reduced(objective, features):
        bends = sorted(_bends(objective, rest), key=lambda bend: bend[0], reverse=True)
        candidates = [
            candidate
            for _, index, axis in bends[:_TRIED]
            for candidate in _halves(rest, index, axis)
        ]
        yield min(candidates, key=lambda candidate: float(objective(candidate).loss))


def _reduced(objective: Objective, features: Tensor) -> list[Tensor]:
    """Lists (n - 1, d) without one of the features, or with the mean of two; least loss first."""
    n = len(features)
    errors = objective(features).errors
    size = torch.linalg.vector_norm(errors, dim=0)
    unit = F.normalize(errors, dim=0)
    alike = unit.T @ unit
    options = [torch.cat([features[:k], features[k + 1 :]]) for k in range(n)]
    for i in range(n):
        for k in range(i):
            if alike[i, k] > _ALIKE:
                mean = (size[i] * features[i] + size[k] * features[k]) / (size[i] + size[k])
                others = [index for index in range(n) if index not in (i, k)]
                options.append(torch.cat([features[others], mean[None]]))
    return sorted(options, key=lambda option: float(objective(option).loss))


def _bends(objective: Objective, features: Tensor) -> Iterator[tuple[float, int, Tensor]]:
    """Yields how much the residual bends at each feature, its index, and the direction (d,).

    σ(w'(x + δ)) + σ(w'(x - δ)) - 2 σ(w'x) is largest where w'x is near 0 and w'δ is not.
    """
    head, value = objective.head, objective(features)
    weights, residual = head.hidden[head.planted], value.residual[:, head.planted]
    for index, feature in enumerate(features):
        bend = F.normalize(value.errors[:, index], dim=0) @ residual
        distance = (weights @ feature).abs()
        near = distance < distance.quantile(_NEAR)
        spread = weights[near].T @ (bend[near, None] * weights[near])
        unit = F.normalize(feature, dim=0)
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
    """Yields (n + 1, d) with feature `index` split along `axis`."""
    feature = features[index]
    others = torch.cat([features[:index], features[index + 1 :]])
    for angle in _ANGLES:
        step = angle * torch.linalg.vector_norm(feature) * axis
        yield torch.cat([others, (feature + step)[None], (feature - step)[None]])


_RUNS = 5
"""Runs of L-BFGS after which the variables are scaled anew."""
_EQUATIONS = 10
"""Equations for each unknown that a subset of the neurons is to have."""
_WEIGHTS = 1 << 18
"""Weights of the neurons in a subset; fewer would gain no time."""
_LITTLE, _POLISH = 0.03, 1e-4
"""Relative gains of a run below which a split is tried, and below which the fit ends."""
_ROWS_GAIN = 0.95
"""Share of the rows' misfit down to which a fit of the rows must bring it to be repeated."""
_RUNS_BETWEEN = 2
"""Runs from one fit of the rows to the next."""
_EXPLAINED = 1e-5
"""Share left unexplained up to which no image is missing."""
_SPLIT_GAIN, _NOISY_SPLIT_GAIN = 0.7, 0.9
"""Share of the loss beyond noise down to which a split must bring it in one run. Behind noise,
which flattens valleys, it has two runs if the first brings it down to `_PROMISING`."""
_PROMISING = 1.5
_FEW = 3
"""Splits that are tried at a time while a subset of the neurons counts."""
_STUCK = 1.03
"""Times the loss that noise leaves the best fit, from which a fit is in a local minimum."""


@dataclass(kw_only=True)
class OutputFit:
    """Fits ∂L/∂A from several starts, of which it follows the best."""

    head: HeadGradient
    subset: Objective
    """Of a subset of the neurons."""
    objective: Objective
    """That of the subset, and in the end that of all neurons."""
    noise: float
    """Variance of the noise in each entry of ∂L/∂A."""
    untried: list[Tensor]
    """Starts (N, d) that are still to be tried."""
    features: Tensor
    """(N, d): of the best start so far."""
    loss: Tensor
    """Share of ∂L/∂A that they leave unexplained (0-d)."""
    splitting: bool
    """Whether a split may gain anything."""
    fits_rows: bool
    """Whether what pruning has left of ∂L/∂W may correct the fit."""
    descent: _Descent | None = None
    """The descent that found `features`."""
    settled: bool = False
    """Whether the last iterations gained little."""
    splits_failed: bool = False
    """Whether all splits have been tried without a gain."""
    before_rows: tuple[float, Tensor, Tensor] | None = None
    """What the rows were missed by, features and loss before the last fit of the rows."""

    @classmethod
    def start(
        cls,
        head: HeadGradient,
        starts: list[Tensor],
        *,
        splitting: bool = True,
        all_neurons: bool = False,
        weights: int = _WEIGHTS,
    ) -> OutputFit:
        """Prepares a fit from the best of `starts` (N, d).

        Args:
            head: the observed gradient.
            starts: the features to start from.
            splitting: whether to leave local minima by splitting features.
            all_neurons: whether all neurons count from the start.
            weights: if not, the least number of weights that the neurons that do count have.

        Raises:
            AttackFailed: nothing is left of ∂L/∂A.
        """
        if not head.grad_output.any():
            raise AttackFailed("nothing is left of ∂L/∂A, which is to be fitted")
        unknowns = starts[0].numel() + len(starts[0]) * len(head.output)
        fewest = weights // head.hidden.shape[1]
        subset = Objective(head if all_neurons else head.subset(_EQUATIONS * unknowns, fewest))
        return cls(
            head=head,
            subset=subset,
            objective=subset,
            noise=head.noise,
            untried=list(starts),
            features=starts[0],
            loss=torch.full((), torch.inf, device=head.hidden.device),
            splitting=splitting and len(starts[0]) > 1,
            fits_rows=_row_fit.applies(head),
        )

    @property
    def all_neurons(self) -> bool:
        """Whether all neurons count by now."""
        return self.objective.head is self.head

    @property
    def noise_floor(self) -> float:
        """The loss that noise leaves the best fit."""
        unknowns = self.features.numel() + len(self.features) * len(self.head.output)
        return self.objective.noise_floor(self.noise, unknowns)

    @property
    def incomplete(self) -> bool:
        """Whether more is left unexplained than noise can account for."""
        return float(self.loss) > max(_EXPLAINED, _STUCK * self.noise_floor)

    @property
    def stuck(self) -> bool:
        """Whether a split may find what is left unexplained."""
        return self.splitting and not self.splits_failed and self.incomplete

    @property
    def converged(self) -> bool:
        """Whether neither iterations nor splits nor rows gain anything."""
        return self.all_neurons and self.settled and not self.stuck and not self.fits_rows

    def improve(self, budget: int) -> int:
        """Runs the next start or the best, or tries splits; returns how many iterations it took.

        `budget` bounds those of splits and of a fit of the rows.
        """
        if self.untried:
            self._run(_Descent(self.objective, self.untried.pop(0)))
            return ITERATIONS
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
        self._run(self.descent or _Descent(self.objective, self.features))
        gain = _LITTLE if not self.all_neurons or self.stuck else _POLISH
        self.settled = not bool(self.loss < before * (1 - gain))
        return ITERATIONS

    def _run(self, descent: _Descent) -> None:
        """Runs `descent`, and keeps what it finds if that is better."""
        features, loss = descent.run()
        if loss < self.loss:
            self.features, self.loss, self.descent = features, loss, descent

    def _fit_rows(self) -> int:
        """Fits the rows of ∂L/∂W and descends from there, unless that gained little last time."""
        errors = self.objective(self.features).errors
        factors = norms(self.head, self.features, errors)[0]
        features, errors = self.features * factors[:, None], errors / factors
        missed = _row_fit.unexplained(self.head, features, errors)
        if self.before_rows is not None and missed > _ROWS_GAIN * self.before_rows[0]:
            _, self.features, self.loss = self.before_rows
            self.descent, self.fits_rows = None, False
            return 0
        self.before_rows = missed, self.features, self.loss
        self.descent = _Descent(self.objective, _row_fit.fit_rows(self.head, features, errors))
        for _ in range(_RUNS_BETWEEN):  # more would lose what the rows have corrected
            self.features, self.loss = self.descent.run()
        return _RUNS_BETWEEN * ITERATIONS

    def _try_splits(self, budget: int) -> int:
        """Tries moves until one gains; if none does, none is tried again."""
        spent, floor = 0, self.noise_floor
        most = budget if self.all_neurons else min(budget, _FEW * ITERATIONS)
        for proposal in moves(self.subset, self.features):
            if most - spent < ITERATIONS:
                break
            descent = _Descent(self.objective, proposal)
            features, loss = descent.run()
            spent += ITERATIONS
            if self.noise and loss - floor < _PROMISING * (self.loss - floor):
                features, loss = descent.run()
                spent += ITERATIONS
            gain = _NOISY_SPLIT_GAIN if self.noise else _SPLIT_GAIN
            if loss - floor < gain * (self.loss - floor):
                self.features, self.loss, self.descent = features, loss, descent
                self.settled = False
                return spent
        self.splits_failed = True
        return spent


class _Descent:
    """Descends by L-BFGS in scaled variables, whose memory lasts over several runs."""

    def __init__(self, objective: Objective, start: Tensor) -> None:
        """Starts at features (N, d)."""
        self._objective = objective
        self._rescale(start)

    def _rescale(self, start: Tensor) -> None:
        self._runs_left = _RUNS
        self._scale = self._objective.scale(self._objective(start), start)
        self._variable = torch.linalg.solve(self._scale, start).requires_grad_()
        self._optimizer = lbfgs(self._variable)

    def run(self) -> tuple[Tensor, Tensor]:
        """Runs `ITERATIONS` iterations; returns features (N, d) and their loss (0-d)."""
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
