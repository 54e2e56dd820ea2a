"""Reconstruction of a row from a closed-form release by an informed adversary.

Balle, Cherubin and Hayes (S&P 2022) let the adversary of differential privacy, who knows all rows
but one, recover the missing one. From coefficients x of least squares that is a closed form (their
section III): B'Bx - B'b of the known rows is f (t - f'x), the features f of the missing row up to
the factor that its target t lacks to what x predicts. From a sketch the leading eigenvector of the
whitened sample covariance is the maximum-likelihood estimate (Tipping and Bishop, Probabilistic
Principal Component Analysis, JRSS-B 1999), up to its sign. Both start a search of the most likely
row given the release and what is public.

What is returned is the mean of that posterior distribution, which has the least squared error. It
is found by importance sampling (Owen, Monte Carlo Theory, Methods and Examples, 2013, chapter 9)
from the prior and from normal distributions around the maxima, so that it is right where either is.
A kernel regression (X̃, α̃) holds the row itself, behind noise: nothing is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Payload, Reconstruction, ReleaseSpec
from fedsim_attacks.closed_form._kernel_release import (
    KERNELS,
    KernelPosterior,
    known_rows,
    match_rows,
    read_model,
)
from fedsim_attacks.closed_form._release_likelihood import (
    KNOWN,
    ReleaseLikelihood,
    release_likelihood,
)

_UNIFORM_VARIANCE = 1 / 3  # variance of a value that is uniform on [-1, 1]


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Holds the missing row's prior: a normal distribution before scaling, cut off at ranges.

    Its mean and covariance are drawn from the other rows towards those of an unknown row, so that
    few others do not make it too sure.
    """

    mean: Tensor
    """(d + 1,): features, then the target."""
    precision: Tensor
    """(d + 1, d + 1): inverse covariance."""
    low: Tensor
    """(d + 1,): least value of each entry; 1 for the constant feature."""
    high: Tensor
    """(d + 1,): largest value of each entry; 1 for the constant feature."""
    row_norm: float
    """Bound on the L2 norm of a row with its target, to which clients scale longer ones."""
    targets: tuple[float, ...]
    """Values that the target can have if it is one of two classes; else empty."""

    def log_density(self, rows: Tensor) -> Tensor:
        """Computes the log density (k,) of `rows` (k, d + 1), not cut off, up to a constant."""
        deviation = rows - self.mean
        return -((deviation @ self.precision) * deviation).sum(1) / 2

    def scale_rows(self, rows: Tensor) -> Tensor:
        """Returns `rows` (n, d + 1), those scaled down that are longer than `row_norm`."""
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scaled: Tensor = rows * (self.row_norm / norm.clamp_min(1e-300)).clamp(max=1)
        return scaled


def prior(spec: ReleaseSpec, knowledge: Knowledge, learned: bool) -> Prior:
    """Builds the missing row's prior: from the other rows if `learned`, else from `spec` alone."""
    size = len(spec.names)
    low, high = -torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    rows = torch.zeros(0, size, dtype=torch.float64)
    if learned and knowledge.other_rows:
        rows = torch.cat(knowledge.other_rows)
    # Equal ends mark the constant feature as fixed: it is not searched.
    if spec.intercept:
        low[-2] = 1
        rows = rows / rows[:, -2:-1]  # undoes the scaling
    # One row of zeros more: a few others shall not make the mean too sure.
    mean = rows.sum(0) / (len(rows) + 1)
    if spec.intercept:
        mean[-2] = 1
    deviation = rows - mean
    spread = _UNIFORM_VARIANCE * torch.eye(size, dtype=torch.float64)
    covariance = (deviation.T @ deviation + size * spread) / (len(rows) + size)
    return Prior(
        mean=mean,
        precision=torch.linalg.inv(covariance),
        low=low,
        high=high,
        row_norm=spec.row_norm,
        targets=(-1.0, 1.0) if spec.classes else (),
    )


_WIDER = 1.2
"""Width of draws around a maximum over the posterior's there: too narrow draws mislead."""


@dataclass(frozen=True, kw_only=True)
class _RowPosterior:
    """The posterior of the missing row, of d features and the target, before clients scale it."""

    likelihood: ReleaseLikelihood
    prior: Prior

    def loss(self, rows: Tensor) -> Tensor:
        """Computes the negative log density (k,) of `rows` (k, d + 1), up to a constant."""
        return -self.likelihood.log_likelihood(
            self.prior.scale_rows(rows)
        ) - self.prior.log_density(rows)

    def scale_rows(self, rows: Tensor) -> Tensor:
        return self.prior.scale_rows(rows)

    @property
    def free(self) -> Tensor:
        """Boolean mask (d + 1,) of the entries that vary over a range; that of a class is False."""
        free = self.prior.low < self.prior.high
        free[-1] &= not self.prior.targets
        return free

    def width(self, row: Tensor, places: Tensor) -> Tensor:
        """Computes directions (k, k), as columns, of entries `places`, as wide as the posterior."""
        with torch.enable_grad():
            entries = row[places].clone().requires_grad_()
            loss = self.loss(row.index_copy(0, places, entries)[None])[0]
            (slope,) = torch.autograd.grad(loss, entries, create_graph=True)
        hessian = [torch.autograd.grad(each, entries, retain_graph=True)[0] for each in slope]
        # Absolute curvatures: away from a maximum some are negative.
        values, vectors = torch.linalg.eigh(torch.stack(hessian))
        values = values.abs()
        # A flat direction would be infinitely wide.
        width: Tensor = vectors / values.clamp_min(1e-12 * float(values.max()) + 1e-300).sqrt()
        return width

    def mean(self, maxima: Sequence[Tensor], samples: int, rng: torch.Generator) -> Tensor:
        """Estimates the mean (d + 1,), scaled, from `samples` draws of each part and class."""
        places = self.free.nonzero().flatten()
        parts: list[_Part] = []
        for target in self.prior.targets or (None,):
            parts.append(self._condition_prior(places, target))
            # Each class has a maximum of its own, and importance sampling needs draws around both.
            near = [row for row in maxima if target is None or float(row[-1]) == target]
            if near and len(places):
                spread = _WIDER * self.width(near[0], places)
                parts.append(_Part(center=near[0], spread=spread, target=target))
        rows = torch.cat([part.draw(places, samples, rng) for part in parts])
        densities = torch.stack([part.log_density(rows, places) for part in parts])
        # The balance heuristic of Veach and Guibas: a draw counts by the density of all parts.
        weights = -self.loss(rows) - densities.logsumexp(0)
        inside = ((rows >= self.prior.low) & (rows <= self.prior.high)).all(1)
        weights = torch.where(inside & weights.isfinite(), weights, -math.inf)
        if not bool(inside.any()) or not bool(weights.isfinite().any()):
            return self.prior.scale_rows(maxima[0][None])[0]
        return weights.softmax(0) @ self.prior.scale_rows(rows)

    def _condition_prior(self, places: Tensor, target: float | None) -> _Part:
        """Conditions the prior of the entries `places` on the other entries and the class."""
        center = self.prior.mean.clone()
        if target is not None:
            center[-1] = target
        own = self.prior.precision[places][:, places]
        deviation = center - self.prior.mean
        # Conditional mean by the precision Λ: μ_a - Λ_aa⁻¹ Λ_ab (x_b - μ_b).
        center[places] -= torch.linalg.solve(own, self.prior.precision[places] @ deviation)
        covariance = torch.linalg.inv(own)
        # An inverse is symmetric only up to rounding.
        spread = torch.linalg.cholesky((covariance + covariance.T) / 2)
        return _Part(center=center, spread=spread, target=target)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A normal distribution of the free entries, in one class."""

    center: Tensor  # (d + 1,): mean, with the fixed entries in their places
    spread: Tensor  # (k, k): a square root of the covariance of the free entries
    target: float | None  # class of all draws; None for a target that is a quantity

    def draw(self, places: Tensor, samples: int, rng: torch.Generator) -> Tensor:
        """Draws rows (samples, d + 1), in which only the k entries `places` vary."""
        steps = torch.randn(samples, len(places), generator=rng, dtype=torch.float64)
        rows = self.center.repeat(samples, 1)
        rows[:, places] += steps @ self.spread.T
        return rows

    def log_density(self, rows: Tensor, places: Tensor) -> Tensor:
        """Computes the log density (n,) of `rows` (n, d + 1), up to a constant of all parts."""
        deviation = (rows - self.center)[:, places]
        steps = torch.linalg.solve(self.spread, deviation.T)
        density: Tensor = -steps.square().sum(0) / 2 - torch.linalg.slogdet(self.spread).logabsdet
        return (
            # Targets are copied and never computed, so that they compare exactly.
            density if self.target is None else density.where(rows[:, -1] == self.target, -math.inf)
        )


@dataclass(kw_only=True)
class _RowSearch(AttackState):
    posterior: _RowPosterior | KernelPosterior
    starts: list[Tensor]  # (d + 1,) each, rows before they are scaled to the bound
    candidates: list[tuple[Tensor, Tensor]]  # (loss, row), the best first
    rng: torch.Generator


@final
class RowReconstruction(Attack[_RowSearch]):
    """Estimates the missing row from the release and all other rows: the mean of its posterior."""

    on_processor: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Balle, Cherubin and Hayes, Reconstructing Training Data with Informed Adversaries, S&P "
        "2022, section III (coefficients); for sketches the maximum-likelihood estimate of Tipping "
        "and Bishop, JRSS-B 1999"
    )
    needs: ClassVar[Grant] = Grant.least(rows="others")
    reads: ClassVar[tuple[Payload, ...]] = (*KNOWN, *KERNELS)

    prior: Literal["others", "ranges"] = "others"
    """Expectation of the row: like the `others`, or anything within the declared `ranges`."""
    iterations: Annotated[int, Field(ge=1, le=100_000)] = 100
    """Iterations of the search from one start, at most."""
    starts: Annotated[int, Field(ge=1, le=100)] = 3
    """Starting points, the most likely of those at hand."""
    samples: Annotated[int, Field(ge=0, le=1_000_000)] = 500
    """Number of draws of each part of the posterior, for its mean. With 0 the maximum is returned;
    of a kernel regression, the released row itself."""
    alpha: bool = True
    """Whether a kernel regression's coefficients α̃ are used, too."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _RowSearch:
        """Chooses starts, of kernels none; AttackFailed without other rows. See `Attack.init`."""
        if observation.payload in KERNELS:
            return self._match(observation, knowledge, rng)
        known = release_likelihood(observation, knowledge)
        expected = prior(observation.release, knowledge, self.prior == "others")
        posterior = _RowPosterior(likelihood=known, prior=expected)
        estimates = (expected.mean, *_estimates(known, expected))
        starts = [each.nan_to_num().clamp(expected.low, expected.high) for each in estimates]
        if expected.targets:  # each row with each class as its target
            starts = [
                torch.cat([row[:-1], row.new_tensor([target])])
                for row in starts
                for target in expected.targets
            ]
        losses = posterior.loss(torch.stack(starts))
        starts = [starts[i] for i in losses.argsort()[: self.starts].tolist()]
        return _RowSearch(
            posterior=posterior,
            starts=starts,
            candidates=[(losses.min(), starts[0])],
            rng=rng,
            loss=losses.min(),
        )

    def step(self, state: _RowSearch) -> _RowSearch:
        """Searches from the next start and keeps the likeliest row. See `Attack.step`."""
        assert isinstance(state.posterior, _RowPosterior)
        row = self._search(state.posterior, state.starts[state.iteration])
        loss = state.posterior.loss(row[None])[0]
        candidates = sorted([*state.candidates, (loss, row)], key=lambda entry: float(entry[0]))
        return replace(
            state, candidates=candidates, loss=candidates[0][0], iteration=state.iteration + 1
        )

    def terminate(self, state: _RowSearch) -> bool:
        """Returns whether all starts have been searched from. See `Attack.terminate`."""
        return state.iteration >= len(state.starts)

    def postprocess(self, state: _RowSearch) -> Reconstruction:
        """Returns the estimate as `rows` (1, d + 1), scaled to the bound and cut to [-1, 1].

        A row of a kernel regression has its c classes' probabilities in place of a target.
        """
        posterior, maxima = state.posterior, [row for _, row in state.candidates]
        row = posterior.scale_rows(maxima[0][None])
        if self.samples:
            row = posterior.mean(maxima, self.samples, state.rng)[None]
        return Reconstruction(
            rows=row.clamp(-1, 1), loss=float(state.loss), iterations=state.iteration
        )

    def total(self) -> int:
        """Returns the number of starts, each of which is one iteration."""
        return self.starts

    def _match(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> _RowSearch:
        """Matches released rows with the known ones; of the last one nothing is searched."""
        known = known_rows(knowledge)
        model = read_model(observation, known)
        posterior = KernelPosterior(
            matched=match_rows(model, known, self.alpha),
            learned=self.prior == "others",
            alpha=self.alpha,
        )
        row = posterior.released_row()
        loss = -row.new_tensor(posterior.matched.likelihood)
        return _RowSearch(
            posterior=posterior, starts=[], candidates=[(loss, row)], rng=rng, loss=loss
        )

    def _search(self, posterior: _RowPosterior, start: Tensor) -> Tensor:
        """Searches the nearest maximum of the posterior within the ranges, at the start's class."""
        # Entries that leave their range are set to its end, and the others searched again.
        row, free = start, posterior.free
        while bool(free.any()):
            maximum = self._maximize(posterior, row, free.nonzero().flatten())
            row = maximum.clamp(posterior.prior.low, posterior.prior.high)
            outside = (maximum != row) & free
            if not bool(outside.any()):
                break
            free &= ~outside
        return row

    def _maximize(self, posterior: _RowPosterior, start: Tensor, places: Tensor) -> Tensor:
        from scipy.optimize import minimize

        # In this basis all curvatures are alike, and the problem is well conditioned for L-BFGS.
        basis = posterior.width(start, places)

        def at(steps: Tensor) -> Tensor:
            return start.index_copy(0, places, start[places] + basis @ steps)

        def value(steps: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            point = torch.from_numpy(steps.copy()).requires_grad_()
            loss = posterior.loss(at(point)[None])[0]
            (slope,) = torch.autograd.grad(loss, point)
            return float(loss.detach()), slope.numpy()

        options = {"maxiter": self.iterations}
        origin = np.zeros(len(places))
        result = minimize(value, origin, jac=True, method="L-BFGS-B", options=options)
        return at(torch.from_numpy(result.x))


def _estimates(known: ReleaseLikelihood, expected: Prior) -> Iterator[Tensor]:
    """Yields rows that the release alone suggests, of either sign or of several scales."""
    if known.kind == "sketch":
        factor = torch.linalg.cholesky(known.gram)
        # Tipping and Bishop: beside the identity, the leading eigenvalue is 1 + |row|².
        white = torch.linalg.solve_triangular(factor, known.observed, upper=False)
        values, vectors = torch.linalg.eigh(white @ white.T / known.columns)
        excess = (values[-1] - 1).clamp_min(0).sqrt() / known.scale
        row = factor @ vectors[:, -1] * excess
        yield from (row, -row)
        if expected.low[-2] == 1:  # the constant feature tells the sign and the scale
            yield row / row[-2]
        return
    coefficients = known.observed / known.scale
    # Balle et al., section III: B'Bx - B'b = f (t - f'x).
    direction = known.gram[:-1, :-1] @ coefficients - known.gram[:-1, -1]
    # A residual of 0 hides the row: then B'Bx = B'b holds for the known rows alone.
    if not bool(direction.any()):
        return
    for residual in _residuals(direction, coefficients, expected):
        features = direction / residual
        yield torch.cat([features, (residual + features @ coefficients)[None]])


def _residuals(direction: Tensor, coefficients: Tensor, expected: Prior) -> list[Tensor]:
    """Lists values that the residual t - f'x may have, given that f is `direction` over it."""
    if expected.low[-2] == 1:
        return [direction[-1]]
    least = direction.abs().max()
    residuals = [sign * factor * least for sign in (-1, 1) for factor in (1.0, 1.5, 2.5, 5.0)]
    product = direction @ coefficients
    for target in expected.targets:
        square = target**2 - 4 * product
        if square >= 0:
            residuals += [(target + sign * square.sqrt()) / 2 for sign in (-1, 1)]
    return [residual for residual in residuals if residual != 0]
