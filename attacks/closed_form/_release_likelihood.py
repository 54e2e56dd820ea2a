"""How likely a closed-form release is, as a function of the one row that the attacker lacks.

Whoever knows all rows but v knows the distribution of the release up to v. With K = D'D + σ² I the
Gram matrix of the regularized rows [B, b], A = B'B its part of the features, x̂ the coefficients of
least squares and e² their squared residual:

- a sketch D'G has r independent columns N(0, K);
- coefficients of least squares on such a sketch follow a multivariate t distribution with
  ν = r - d + 1 degrees of freedom, location x̂ and scale e² A^-1 / ν (Lu et al., Lemma 1, have the
  normal limit for large r alone);
- `normal_coefficients` are N(x̂, e² A^-1 / r), and `coefficients` are x̂.

Declared Gaussian noise on the release adds to the covariance. Clipping is taken as a scale, that of
the release expected without v, and t as normal of its covariance where either acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation, ReleaseKind

KNOWN: tuple[ReleaseKind, ...] = (
    "sketch",
    "coefficients",
    "sketched_coefficients",
    "normal_coefficients",
)
"""The kinds of release whose distribution is known."""

_RIDGE = 1e-10
"""Share of K's mean eigenvalue that is added to it: K is singular of fewer rows than columns."""

_EXACT = 1e-6
"""Standard deviation at which a release without randomness is compared with what it should be."""


@dataclass(frozen=True, kw_only=True)
class ReleaseLikelihood:
    """Computes how likely a release is, given the missing row of d features and a target."""

    kind: ReleaseKind
    columns: int  # number r of columns of the sketch
    observed: Tensor
    """The sketch (d + 1, r), or the coefficients (d,), of the rows of `gram` and v; of a sum of
    clients' coefficients, the sum less the others' expected ones."""
    gram: Tensor  # (d + 1, d + 1) K without v
    scale: float  # factor by which clipping shrinks what v's client releases
    variance: Tensor | None
    """(d, d): the covariance of what is added to the coefficients; None if nothing is."""

    def log_likelihood(self, rows: Tensor) -> Tensor:
        """Computes log-likelihoods (k,), up to a constant, of `rows` (k, d + 1), clipped."""
        sketch = self.kind == "sketch"
        rows = self.scale * rows if sketch else rows
        factor = torch.linalg.cholesky(self.gram + rows[:, :, None] * rows[:, None, :])
        # r columns N(0, L L'): log density -r log|L| - |L⁻¹ S|² / 2, up to a constant.
        if sketch:
            inner: Tensor = torch.linalg.solve_triangular(
                factor, self.observed.expand(len(rows), -1, -1), upper=False
            )
            volume: Tensor = factor.diagonal(dim1=1, dim2=2).log().sum(1)
            return -self.columns * volume - inner.square().sum((1, 2)) / 2
        # With noise or clipping the distribution is no t any more: `_normal` takes its covariance.
        if self.kind == "sketched_coefficients" and self.variance is None and self.scale == 1:
            return self._student_t(factor)
        return self._normal(factor)

    def _student_t(self, factor: Tensor) -> Tensor:
        features, residual, distance = self._parts(factor)
        d, r = features.shape[1], self.columns
        volume = features.diagonal(dim1=1, dim2=2).log().sum(1)
        # The density of the multivariate t, without what no row changes.
        return volume + (r + 1 - d) * residual.log() - (r + 1) / 2 * distance.log()

    def _normal(self, factor: Tensor) -> Tensor:
        features, residual, _ = self._parts(factor)
        deviation = self.observed - self.scale * _solve_coefficients(factor)
        covariance = self.scale**2 * _covariance(self.kind, self.columns, features, residual)
        if self.variance is not None:
            covariance = covariance + self.variance
        lower: Tensor = torch.linalg.cholesky(covariance)
        inner: Tensor = torch.linalg.solve_triangular(lower, deviation[:, :, None], upper=False)
        return -lower.diagonal(dim1=1, dim2=2).log().sum(1) - inner.square().sum((1, 2)) / 2

    def _parts(self, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (factor of A, e, z'Kz of z = [observed; -1]) of each row's K = LL'."""
        # z'Kz = e² + (x - x̂)'A (x - x̂), the kernel of the t distribution times e².
        ends = torch.cat([self.observed, -self.observed.new_ones(1)])
        distance = (factor.mT @ ends).square().sum(1)
        return factor[:, :-1, :-1], factor[:, -1, -1], distance


def release_likelihood(observation: Observation, knowledge: Knowledge) -> ReleaseLikelihood:
    """Builds the likelihood of the observed release for an attacker who knows all rows but one."""
    spec = observation.release
    if not knowledge.other_rows:
        raise AttackFailed("the other rows are not known: grant knowledge.rows: others")
    # The update is the mean over clients; below, the sum is compared.
    (observed,) = observation.update.values()
    observed, clients = observed.double(), observation.num_clients
    size = len(spec.names)
    regular = spec.sigma**2 * torch.eye(size, dtype=torch.float64)
    grams = [rows.T @ rows + regular for rows in knowledge.other_rows]
    bound, variance = _read_noise(observation)
    if spec.kind == "sketch":
        # A sketch D'G has an expected squared norm of r tr K.
        scales = [_clipping_factor(bound, spec.columns * float(gram.trace())) for gram in grams]
        total = sum(
            (scale**2 * gram for scale, gram in zip(scales, grams, strict=True)),
            clients * variance * torch.eye(size, dtype=torch.float64),
        )
        assert isinstance(total, Tensor)
        return ReleaseLikelihood(
            kind=spec.kind,
            columns=spec.columns,
            observed=clients * observed,
            gram=_regularize(total, spec.row_norm),
            scale=scales[knowledge.target_client],
            variance=None,
        )
    features = clients * variance * torch.eye(size - 1, dtype=torch.float64)
    expected = torch.zeros_like(observed)
    own = _regularize(grams.pop(knowledge.target_client), spec.row_norm)
    for gram in grams:
        factor = torch.linalg.cholesky(_regularize(gram, spec.row_norm))
        best = _solve_coefficients(factor)
        scale = _clipping_factor(bound, float(best.square().sum()))
        expected += scale * best
        features += scale**2 * _covariance(
            spec.kind, spec.columns, factor[:-1, :-1], factor[-1, -1]
        )
    # Without any randomness the covariance would be 0.
    if spec.kind == "coefficients":
        features += _EXACT**2 * torch.eye(size - 1, dtype=torch.float64)
    best = _solve_coefficients(torch.linalg.cholesky(own))
    return ReleaseLikelihood(
        kind=spec.kind,
        columns=spec.columns,
        observed=clients * observed - expected,
        gram=own,
        scale=_clipping_factor(bound, float(best.square().sum())),
        variance=features if bool(features.any()) else None,
    )


def _solve_coefficients(factor: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(
        factor[..., :-1, :-1].mT, factor[..., -1, :-1, None], upper=True
    )
    return solution.squeeze(-1)


def _covariance(kind: ReleaseKind, columns: int, features: Tensor, residual: Tensor) -> Tensor:
    """Computes the covariance of coefficients from the factor of A (..., d, d) and e (...)."""
    d = features.shape[-1]
    divisor = {
        "normal_coefficients": float(columns),
        # ν / (ν - 2) · 1 / ν of the t distribution, which has no covariance for ν < 3.
        "sketched_coefficients": float(max(columns - d - 1, 1)),
        "coefficients": math.inf,
    }[kind]
    return residual.square()[..., None, None] / divisor * torch.cholesky_inverse(features)


def _regularize(gram: Tensor, row_norm: float) -> Tensor:
    size = len(gram)
    level = _RIDGE * (float(gram.trace()) + row_norm**2) / size
    return gram + level * torch.eye(size, dtype=gram.dtype)


def _clipping_factor(bound: float, square: float) -> float:
    """Computes the factor that clipping to `bound` applies to what has this squared norm."""
    return 1.0 if bound**2 >= square else bound / math.sqrt(square)


def _read_noise(observation: Observation) -> tuple[float, float]:
    """Reads the declared (bound on a client's release, variance of the noise on an entry)."""
    effect = observation.effect
    if not effect.known:
        raise AttackFailed("a defense does not declare its effect: what is likely is not known")
    variance = 0.0
    for noise in effect.noise:
        # Correlated noise is z_t - λ z_{t-1}: the last round's adds λ² of the variance.
        taken_back = noise.correlation**2 if observation.round > 1 else 0.0
        shared = observation.num_clients if noise.on == "sum" else 1
        variance += (1 + taken_back) * noise.variance / shared
    return math.inf if effect.bound is None else effect.bound, variance
