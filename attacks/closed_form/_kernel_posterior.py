"""The posterior mean of the row of a kernel regression that the attacker lacks.

Three things determine the row x. It is like the others: a normal distribution of its class's mean
and of their covariance, estimated as Ledoit and Wolf do (J. Multivariate Anal. 2004). Its noisy
version x̃ was released: Laplace noise is normal noise whose variance is exponential, so that Gibbs
sampling draws x and the variances in turn (Park and Casella, The Bayesian Lasso, JASA 2008). And
(K̃ + λ I) α̃ = Y holds, from which a mixture of the columns tells K(x_j, x) of each other row x_j,
up to what sampling K̃ adds: of the covariance of a Wishart matrix, and none where α̃ is of K
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim_attacks.closed_form._kernel_release import Matched

_WEIGHTS = (0.3, 1.0, 3.0, 10.0, 1e6)
"""How many rows of a class the mean of all rows may count for; the last: classes are alike."""

_EXACT = 1e-4
"""Standard deviation at which what is exact is compared with a linear approximation of it."""


@dataclass(frozen=True, kw_only=True)
class KernelPosterior:
    """The posterior of the row that no known one was matched with."""

    matched: Matched
    others: Tensor
    """(m, d + c)."""
    learned: bool
    """Whether the row is like the others; else any unit vector."""
    alpha: bool
    """Whether the coefficients are used, too."""

    def scaled(self, rows: Tensor) -> Tensor:
        """Scales features down to unit length at most; the classes stay."""
        d = self._dimension
        norm = torch.linalg.vector_norm(rows[:, :d], dim=1, keepdim=True).clamp_min(1)
        return torch.cat([rows[:, :d] / norm, rows[:, d:]], dim=1)

    def released(self) -> Tensor:
        """Returns the released row itself and its classes' probabilities: (d + c,)."""
        return torch.cat([self.matched.model.rows[-1], self._classes()])

    def loss(self) -> Tensor:
        """Returns the negative log-likelihood of the match."""
        return -self.matched.model.rows.new_tensor(self.matched.likelihood)

    def mean(self, maxima: Sequence[Tensor], samples: int, rng: torch.Generator) -> Tensor:
        """Estimates the mean of the row (d + c,), `maxima` being its released version."""
        prior = class_prior(self.others, self._dimension, self.learned)
        row = posterior_mean(self.matched, prior, self.alpha, samples, rng)
        return self.scaled(torch.cat([row, self._classes()])[None])[0]

    @property
    def _dimension(self) -> int:
        return self.matched.model.rows.shape[1]

    def _classes(self) -> Tensor:
        if self.alpha:
            return self.matched.model.labels[-1]
        return class_prior(self.others, self._dimension, self.learned).shares


@dataclass(frozen=True, kw_only=True)
class ClassPrior:
    """A normal distribution of each class's features, and the shares of the classes."""

    means: Tensor
    """(c, d)."""
    covariance: Tensor
    """(d, d), of all classes."""
    shares: Tensor
    """(c,) of rows in each class."""

    def marginal(self) -> tuple[Tensor, Tensor]:
        """Computes mean (d,) and covariance (d, d) of the features over all classes."""
        mean = self.shares @ self.means
        deviation = self.means - mean
        return mean, self.covariance + (deviation.T * self.shares) @ deviation


@dataclass(frozen=True, kw_only=True)
class Equations:
    """Values of K(x_j, x) that α̃ determines, with normal errors, for the others x_j."""

    rows: Tensor
    """(m, d) x_j."""
    kernel: Tensor
    """(d, d) S."""
    values: Tensor
    """(m,)."""
    precision: Tensor
    """(m, m) inverse of the errors' covariance."""

    def linear(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Computes K(x_j, x) (m,) and its slopes (m, d) at (d,) `row`."""
        inner, smooth = self.rows @ row, self.rows @ (self.kernel @ row)
        slopes = smooth[:, None] * self.rows + inner[:, None] * (self.rows @ self.kernel)
        return inner * smooth, slopes


def class_prior(others: Tensor, dimension: int, learned: bool) -> ClassPrior:
    """Fits (m, d + c) other rows if `learned`, d being `dimension`; else takes any unit vector.

    A class's mean is drawn towards that of all rows, as far as predicts each row best from the
    rest; the covariance is of what those predictions miss.
    """
    features, labels = others[:, :dimension], others[:, dimension:]
    c = labels.shape[1]
    any_direction = torch.eye(dimension, dtype=torch.float64) / dimension
    if not learned or len(others) < 2:
        means = torch.zeros(c, dimension, dtype=torch.float64)
        shares = torch.full((c,), 1 / c, dtype=torch.float64)
        return ClassPrior(means=means, covariance=any_direction, shares=shares)
    from sklearn.covariance import ledoit_wolf

    total, sums, counts = features.sum(0), labels.T @ features, labels.sum(0)
    rest = (total - features) / (len(others) - 1)
    residuals = []
    for weight in _WEIGHTS:
        own = labels @ sums - features + weight * rest
        residuals.append(features - own / (labels @ counts - 1 + weight)[:, None])
    best = min(range(len(residuals)), key=lambda i: float(residuals[i].square().sum()))
    covariance, _ = ledoit_wolf(residuals[best].numpy(), assume_centered=True)
    weight = _WEIGHTS[best]
    return ClassPrior(
        means=(sums + weight * total / len(others)) / (counts[:, None] + weight),
        # Nothing is singular, even if all rows are alike.
        covariance=torch.from_numpy(covariance) + 1e-9 * any_direction,
        shares=(counts + 1 / c) / (len(others) + 1),
    )


def equations(matched: Matched, row: Tensor) -> Equations | None:
    """Derives K(x_j, x) from α̃ near (d,) `row`; None if α̃ does not depend on the kernel.

    The mixture α̃ u of the columns is that with 1 at the target and the least error.
    """
    model, (m, d) = matched.model, (len(matched.others), len(row))
    if model.clients > 1 or model.draws == 0 or m == 0:
        return None
    known = matched.others[:, :d]
    every = torch.cat([known, row[None]])
    inner = every @ every.T
    gram = inner * (every @ model.kernel @ every.T)
    gram = gram + model.lift * torch.eye(m + 1, dtype=gram.dtype)
    spread = model.alpha.T @ gram @ model.alpha
    target = model.alpha[-1]
    mixture = torch.linalg.lstsq(spread, target[:, None], driver="gelsd").solution[:, 0]
    mixture = mixture / (target @ mixture)
    weights = model.alpha @ mixture
    values = model.labels @ mixture - model.ridge * weights
    values = values[:-1] - gram[:-1, :-1] @ weights[:-1]
    along = (gram @ weights)[:-1]
    errors = gram[:-1, :-1] * (weights @ gram @ weights) + torch.outer(along, along)
    exact = _EXACT**2 * torch.eye(m, dtype=gram.dtype)
    covariance = errors / model.draws + exact
    return Equations(
        rows=known,
        kernel=model.kernel,
        values=values,
        precision=torch.cholesky_inverse(torch.linalg.cholesky(covariance)),
    )


def posterior_mean(
    matched: Matched,
    prior: ClassPrior,
    alpha: bool,
    samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Estimates the target's features (d,); with `alpha` also from its label and equations.

    Averages `samples` draws, after a fifth as many that are thrown away.

    Args:
        matched: the model and the known rows.
        prior: of the features.
        alpha: whether the coefficients are used.
        samples: draws that count.
        generator: of the draws.
    """
    model = matched.model
    released = model.rows[-1]
    if not model.scale:
        return released
    mean, covariance = prior.marginal()
    if alpha:
        mean, covariance = model.labels[-1] @ prior.means, prior.covariance
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    pull = precision @ mean
    noise = torch.full_like(released, model.variance())
    row = torch.linalg.solve(precision + (1 / noise).diag(), pull + released / noise)
    exact = equations(matched, row) if alpha else None
    total = torch.zeros_like(released)
    burn_in = max(20, samples // 5)
    for draw in range(burn_in + samples):
        inverse = 1 / noise
        own, right = precision + inverse.diag(), pull + released * inverse
        if exact:
            values, slopes = exact.linear(row)
            weighted = slopes.T @ exact.precision
            own = own + weighted @ slopes
            right = right + weighted @ (exact.values - values + slopes @ row)
        lower = torch.linalg.cholesky(own)
        center = torch.cholesky_solve(right[:, None], lower)[:, 0]
        step = torch.randn(len(released), 1, generator=generator, dtype=torch.float64)
        row = center + torch.linalg.solve_triangular(lower.T, step, upper=True)[:, 0]
        noise = 1 / _inverse_variances((released - row).abs(), model.scale, generator)
        if draw >= burn_in:
            total += center
    mean_row = total / samples
    return released + (mean_row - released).clamp(-model.bound, model.bound)


def _inverse_variances(size: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Draws the inverse variances of normal noise of this `size` |e| from their posterior.

    It is inverse Gaussian of mean 1 / (b |e|) and shape 1 / b² (Michael, Schucany and Haas, The
    American Statistician 1976).
    """
    mean = 1 / (scale * size.clamp_min(1e-9 * scale))
    shape = 1 / scale**2
    chi = torch.randn(size.shape, generator=generator, dtype=torch.float64).square()
    ratio = mean * chi / (2 * shape)
    # The smaller root, without the cancellation of 1 + ratio - sqrt(ratio (2 + ratio)).
    root = mean / (1 + ratio + (ratio * (2 + ratio)).sqrt())
    share = torch.rand(size.shape, generator=generator, dtype=torch.float64)
    return torch.where(share <= mean / (mean + root), root, mean.square() / root)


def log_normal(rows: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Evaluates the log density of (n, d) rows: (n,)."""
    lower: Tensor = torch.linalg.cholesky(covariance)
    inner: Tensor = torch.linalg.solve_triangular(lower, (rows - mean).T, upper=False)
    level = lower.diagonal().log().sum() + len(mean) / 2 * math.log(2 * math.pi)
    return -inner.square().sum(0) / 2 - level
