"""The posterior distribution of a row: its density, its width at a point, and its mean.

The mean is what has the least squared error. Where a release tells little the posterior is wide,
and its highest point may be far from most of it: the noise of a sketch has some direction that fits
a row better than none. The mean is found by importance sampling (Owen, Monte Carlo Theory, Methods
and Examples, 2013, chapter 9) from the prior and from normal distributions around the maxima, so
that it is right where either is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.contracts.grant import Knowledge
from fedsim.types import ReleaseSpec
from fedsim_attacks.closed_form._release_likelihood import ReleaseLikelihood

_UNIFORM_VARIANCE = 1 / 3
"""Of a value that is uniform on [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A normal distribution of rows before they are scaled to the bound, cut off at their ranges.

    Its mean and covariance are those of the other rows and of as many rows as there are columns of
    which nothing is known, so that few others do not make it too sure.
    """

    mean: Tensor
    """(d + 1,)."""
    precision: Tensor
    """(d + 1, d + 1)."""
    low: Tensor
    """(d + 1,) of each entry; the constant feature's is 1."""
    high: Tensor
    row_norm: float
    targets: tuple[float, ...]
    """What the target can be, if it is of two classes."""

    def log_density(self, rows: Tensor) -> Tensor:
        """Evaluates (k, d + 1) rows, up to a constant: (k,)."""
        deviation = rows - self.mean
        return -((deviation @ self.precision) * deviation).sum(1) / 2

    def scaled(self, rows: Tensor) -> Tensor:
        """Scales rows as clients do: longer ones down to the bound."""
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scaled: Tensor = rows * (self.row_norm / norm.clamp_min(1e-300)).clamp(max=1)
        return scaled


def prior(spec: ReleaseSpec, knowledge: Knowledge, learned: bool) -> Prior:
    """Builds the target's prior: from the other rows if `learned`, else from what is public."""
    size = len(spec.names)
    low, high = -torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    rows = torch.zeros(0, size, dtype=torch.float64)
    if learned and knowledge.other_rows:
        rows = torch.cat(knowledge.other_rows)
    if spec.intercept:
        low[-2] = 1
        rows = rows / rows[:, -2:-1]  # undoes the scaling
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
"""How much wider than the posterior at its maximum the draws around it are: importance sampling
fails where it draws too narrowly."""


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Of a row before it is scaled to the bound."""

    likelihood: ReleaseLikelihood
    prior: Prior

    def loss(self, rows: Tensor) -> Tensor:
        """Computes the negative log density of (k, d + 1) rows, up to a constant: (k,)."""
        return -self.likelihood.log_likelihood(self.prior.scaled(rows)) - self.prior.log_density(
            rows
        )

    def scaled(self, rows: Tensor) -> Tensor:
        """Scales rows as clients do."""
        return self.prior.scaled(rows)

    @property
    def free(self) -> Tensor:
        """(d + 1,) bool: the entries that can be anything in their range; a class cannot."""
        free = self.prior.low < self.prior.high
        free[-1] &= not self.prior.targets
        return free

    def width(self, row: Tensor, places: Tensor) -> Tensor:
        """Computes coordinates (k, k) in which the density at (d + 1,) `row` falls alike.

        They are of the entries `places`. A release may tell some directions a million times as well
        as others.
        """

        with torch.enable_grad():
            entries = row[places].clone().requires_grad_()
            loss = self.loss(row.index_copy(0, places, entries)[None])[0]
            (slope,) = torch.autograd.grad(loss, entries, create_graph=True)
        hessian = [torch.autograd.grad(each, entries, retain_graph=True)[0] for each in slope]
        values, vectors = torch.linalg.eigh(torch.stack(hessian))
        values = values.abs()
        width: Tensor = vectors / values.clamp_min(1e-12 * float(values.max()) + 1e-300).sqrt()
        return width

    def mean(self, maxima: Sequence[Tensor], samples: int, rng: torch.Generator) -> Tensor:
        """Estimates the mean (d + 1,) of the scaled row, from `samples` draws of each part.

        `maxima` are (d + 1,) rows, the likeliest first; if no draw is within the ranges, that is
        returned.
        """
        places = self.free.nonzero().flatten()
        parts: list[_Part] = []
        for target in self.prior.targets or (None,):
            parts.append(self._expected(places, target))
            near = [row for row in maxima if target is None or float(row[-1]) == target]
            if near and len(places):
                spread = _WIDER * self.width(near[0], places)
                parts.append(_Part(center=near[0], spread=spread, target=target))
        rows = torch.cat([part.draw(places, samples, rng) for part in parts])
        densities = torch.stack([part.log_density(rows, places) for part in parts])
        weights = -self.loss(rows) - densities.logsumexp(0)
        inside = ((rows >= self.prior.low) & (rows <= self.prior.high)).all(1)
        weights = torch.where(inside & weights.isfinite(), weights, -math.inf)
        if not bool(inside.any()) or not bool(weights.isfinite().any()):
            return self.prior.scaled(maxima[0][None])[0]
        return weights.softmax(0) @ self.prior.scaled(rows)

    def _expected(self, places: Tensor, target: float | None) -> _Part:
        """Conditions the prior of the entries `places` on the others and the class."""
        center = self.prior.mean.clone()
        if target is not None:
            center[-1] = target
        own = self.prior.precision[places][:, places]
        deviation = center - self.prior.mean
        center[places] -= torch.linalg.solve(own, self.prior.precision[places] @ deviation)
        covariance = torch.linalg.inv(own)
        spread = torch.linalg.cholesky((covariance + covariance.T) / 2)
        return _Part(center=center, spread=spread, target=target)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A normal distribution of the free entries, in one class."""

    center: Tensor
    spread: Tensor
    """(k, k) a square root of the covariance."""
    target: float | None

    def draw(self, places: Tensor, samples: int, rng: torch.Generator) -> Tensor:
        """Draws (samples, d + 1) rows."""
        steps = torch.randn(samples, len(places), generator=rng, dtype=torch.float64)
        rows = self.center.repeat(samples, 1)
        rows[:, places] += steps @ self.spread.T
        return rows

    def log_density(self, rows: Tensor, places: Tensor) -> Tensor:
        """Evaluates (n, d + 1) rows, up to a constant that all parts share; -inf elsewhere."""
        deviation = (rows - self.center)[:, places]
        steps = torch.linalg.solve(self.spread, deviation.T)
        density: Tensor = -steps.square().sum(0) / 2 - torch.linalg.slogdet(self.spread).logabsdet
        return (
            density if self.target is None else density.where(rows[:, -1] == self.target, -math.inf)
        )
