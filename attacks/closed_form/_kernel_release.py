"""A released kernel regression, read as what it is made of: X̃, α̃ and the labels.

Learner `ntk` releases a model (X̃, α̃), or the predictor that it makes, of which `_quadratic_form`
recovers it. X̃ are the rows of a client behind truncated Laplace noise, or as they are, and α̃ =
(K̃ + λ I)⁻¹ Y, K̃ being the covariance of a few draws of N(0, K + γ I), or K itself. Nothing protects
labels: Y'α̃ = Y'(K̃ + λ I)⁻¹ Y is symmetric whatever K̃ is, and of all ways to label the rows only the
true one makes it so, but for coincidences.

Three things determine the row x that the attacker lacks, of which the posterior mean is estimated.
It is like the others: a normal distribution of its class's mean and of their covariance (Ledoit and
Wolf, J. Multivariate Anal. 2004). Its noisy version x̃ was released: Laplace noise is normal noise
whose variance is exponential, so that Gibbs sampling draws x and the variances in turn (Park and
Casella, The Bayesian Lasso, JASA 2008). And (K̃ + λ I) α̃ = Y holds, from which a mixture of the
columns tells K(x_j, x) of each other row x_j, up to what sampling K̃ adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.types import Effect, Observation, ReleaseKind
from fedsim.words import number_of
from fedsim_attacks.closed_form._quadratic_form import complete_rows, decompose_form

KERNELS: tuple[ReleaseKind, ...] = ("kernel_regression", "kernel_model")
"""The kinds of release that `read_model` reads."""

_EXACT = 1e-6  # scale of the noise that is assumed on rows to which none was added

_FAR = 1e6
"""Loss of log-likelihood where a row is impossible; finite, so that the least bad match exists."""


@dataclass(frozen=True, kw_only=True)
class KernelModel:
    """Holds a released kernel regression of n rows in any order, of d features and c classes."""

    rows: Tensor  # (n, d) X̃
    alpha: Tensor  # (n, c) α̃
    labels: Tensor  # (n, c) Y, one entry of 1 in each row, derived from α̃
    scale: float  # scale b of the Laplace noise on each entry of X̃; 0 without noise
    bound: float  # bound B that no noise exceeds; infinite where the rows' lengths are estimates
    draws: float  # number k of Gaussian draws in K̃; infinite where α̃ is computed from K itself
    lift: float  # γ, added to the diagonal of K before it is sampled
    ridge: float  # λ of the kernel ridge regression
    kernel: Tensor  # (d, d) matrix S of the kernel K(x, z) = (x'z)(x'Sz)
    clients: int  # number of clients whose rows these are; each has coefficients of its own

    def log_density(self, rows: Tensor) -> Tensor:
        """Computes the log density (m, n) of each released row, given each of `rows` (m, d)."""
        scale = self.scale or _EXACT
        deviation = (self.rows - rows[:, None]).abs()
        # Normalization of Laplace noise cut off at ±B: 2 b (1 - exp(-B / b)).
        level = math.log(-2 * scale * math.expm1(-self.bound / scale))
        # Rounding may put noise that is at its bound a little beyond it.
        beyond = (deviation > self.bound * (1 + 1e-9)).sum(2)
        return -deviation.sum(2) / scale - rows.shape[1] * level - _FAR * beyond

    def variance(self) -> float:
        """Computes the variance of the noise on an entry, as if the noise were not truncated."""
        return 2 * (self.scale or _EXACT) ** 2


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Holds a model whose rows are matched with the known ones."""

    model: KernelModel
    """The others' rows first, in the order in which they are known; then the target's."""
    others: Tensor  # (n - 1, d + c): unit features and one-hot label of each row but the target's
    likelihood: float  # log-likelihood of the match


def read_model(observation: Observation, known: Tensor) -> KernelModel:
    """Reads the released model, or raises AttackFailed; `known` (m, d + c) are the other rows."""
    spec = observation.release
    unknown = [] if observation.effect == Effect() else ["the defense of the update"]
    parameters = {"features": {"scale", "bound"}, "kernel": {"samples", "lift"}}
    unknown += [name for name, own in spec.statistics.items() if set(own) != parameters.get(name)]
    if unknown:
        raise AttackFailed(f"what {unknown[0]} does to a kernel regression is not known here")
    noise = spec.statistics.get("features", {"scale": 0.0, "bound": math.inf})
    sampling = spec.statistics.get("kernel", {"samples": math.inf, "lift": 0.0})
    kernel = observation.buffers["kernel"].double().cpu()
    if spec.kind == "kernel_model":
        rows, alpha = (observation.update[name].double().cpu() for name in ("features", "alpha"))
        # Rows of zeros pad a release to its declared size, and predict nothing.
        nonzero = rows.any(1) | alpha.any(1)
        rows, alpha = rows[nonzero], alpha[nonzero]
        labels = _symmetric_labels(alpha)
    else:
        # The server sees the clients' mean, and the rows that are sought make up the sum.
        d, form = len(kernel), observation.num_clients * observation.update["form"].double().cpu()
        # A decomposition tells at most d rows apart; more take the known ones, if they are exact.
        if noise["scale"] == 0 and len(known) >= d:
            rows, alpha = complete_rows(form, kernel, known[:, :d])
            labels = _last_label(alpha, known[:, d:])
        else:
            rows, alpha = _decompose_once(form.numpy().tobytes(), kernel.numpy().tobytes(), d)
            labels = _symmetric_labels(alpha)
        # x and -x predict alike: of the two, rows are like the others.
        usual = known[:, :d].sum(0)
        rows = torch.where((rows @ usual < 0)[:, None], -rows, rows)
    model = KernelModel(
        rows=rows,
        alpha=alpha,
        labels=labels,
        scale=noise["scale"],
        bound=noise["bound"],
        draws=sampling["samples"],
        lift=sampling["lift"],
        ridge=float(spec.parameters["ridge"]),
        kernel=kernel,
        clients=observation.num_clients,
    )
    return _rescale(model) if spec.kind == "kernel_regression" and model.scale else model


def _symmetric_labels(alpha: Tensor) -> Tensor:
    """Searches one-hot labels Y (n, c) with which Y'α of `alpha` (n, c) is most symmetric."""
    # Each change of a label is the one that helps most. With two classes and many rows symmetry is
    # a single equation, and the search may end with wrong labels.
    n, c = alpha.shape
    eye = torch.eye(c, dtype=alpha.dtype)
    labels = alpha.argmax(1)
    for _ in range(n):
        gap = alpha.T @ eye[labels]
        gap = gap - gap.T
        # With u a row's coefficients and v what its label changes by, gap changes by uv' - vu'.
        along, own = alpha @ gap, labels[:, None]
        # |gap|² changes by 4 u'gap v + 4 |u|² - 2 (u'v)², where v is e_new - e_old.
        change = 4 * (along - along.gather(1, own))
        change += 4 * alpha.square().sum(1, keepdim=True)
        change -= 2 * (alpha - alpha.gather(1, own)).square()
        change.scatter_(1, own, 0.0)
        best = int(change.argmin())
        # Changes within rounding could be made and undone for ever.
        if float(change.view(-1)[best]) >= -1e-9 * float(gap.square().sum()):
            break
        labels = labels.index_fill(0, torch.tensor(best // c), best % c)
    return eye[labels]


def _last_label(alpha: Tensor, known: Tensor) -> Tensor:
    """Completes labels (n - 1, c) to Y (n, c): the last makes Y'α of `alpha` most symmetric."""
    eye = torch.eye(alpha.shape[1], dtype=alpha.dtype)
    each = alpha[:-1].T @ known + alpha[-1][:, None] * eye[:, None, :]
    gaps = (each - each.transpose(1, 2)).flatten(1).norm(dim=1)
    return torch.cat([known, eye[gaps.argmin()][None]])


def match_rows(model: KernelModel, others: Tensor, alpha: bool) -> Matched:
    """Matches each known row (m, d + c) with a released one, by labels, too, if `alpha`."""
    require_one_missing(model, others)
    places, likelihood = best_assignment(log_likelihoods(model, others, alpha))
    unmatched = sorted(set(range(len(model.rows))) - set(places))
    order = torch.tensor([*places, *unmatched])
    ordered = replace(
        model, rows=model.rows[order], alpha=model.alpha[order], labels=model.labels[order]
    )
    return Matched(model=ordered, others=others, likelihood=likelihood)


def require_one_missing(model: KernelModel, others: Tensor) -> None:
    """Raises AttackFailed unless m + 1 rows were released, `others` (m, d + c) being known."""
    if len(others) + 1 != len(model.rows):
        raise AttackFailed(
            f"of {number_of(len(model.rows), 'released row')} {len(others)} are known; the attack "
            "is on the one that is not"
        )


def log_likelihoods(model: KernelModel, rows: Tensor, alpha: bool) -> Tensor:
    """Computes log-likelihoods (m, n) of `rows` behind released ones; `alpha` counts labels."""
    d = model.rows.shape[1]
    density = model.log_density(rows[:, :d])
    return density - _FAR * (1 - rows[:, d:] @ model.labels.T) if alpha else density


def best_assignment(likelihoods: Tensor) -> tuple[list[int], float]:
    """Finds a column of its own for each row of `likelihoods` (m, n), and their largest sum."""
    from scipy.optimize import linear_sum_assignment

    rows, places = linear_sum_assignment(likelihoods.numpy(), maximize=True)
    return places.tolist(), float(likelihoods[rows, places].sum())


def known_rows(knowledge: Knowledge) -> Tensor:
    """Concatenates granted rows (m, d + c), features and one-hot classes; AttackFailed of none."""
    if not knowledge.other_rows:
        raise AttackFailed("the other rows are not known: grant knowledge.rows: others")
    return torch.cat(knowledge.other_rows)


@lru_cache(maxsize=1)
def _decompose_once(form: bytes, kernel: bytes, dimension: int) -> tuple[Tensor, Tensor]:
    # One release is asked about hundreds of candidates, and is the same for all of them.
    parts = torch.frombuffer(bytearray(form), dtype=torch.float64)
    smooth = torch.frombuffer(bytearray(kernel), dtype=torch.float64)
    return decompose_form(
        parts.view(-1, dimension, dimension),
        smooth.view(dimension, dimension),
        torch.Generator().manual_seed(0),
    )


def _rescale(model: KernelModel) -> KernelModel:
    """Rescales noisy rows: to the expected length, or as the symmetry of Y'α tells."""
    # With w the squared lengths' inverses, Y' diag(w) α' is symmetric for the α' of unit rows:
    # linear equations that determine w up to a factor, if there are enough.
    (n, d), c = model.rows.shape, model.alpha.shape[1]
    squares = torch.full((n,), 1 + d * model.variance(), dtype=torch.float64)
    # Y'α has c (c - 1) / 2 pairs of entries to compare: fewer do not determine n weights.
    if 1 < n <= c * (c - 1) // 2:
        parts = model.alpha[:, :, None] * model.labels[:, None, :]
        parts = (parts - parts.transpose(1, 2)).flatten(1)
        _, values, vectors = torch.linalg.svd(parts.T, full_matrices=False)
        # The null vector is w up to a factor: its sign is known, as w is positive.
        inverse = vectors[-1] * vectors[-1].sum().sign()
        if values[-1] < 1e-6 * values[0] and bool((inverse > 0).all()):
            # The open factor is set so that the mean of the squared lengths is the expected one.
            squares = squares * len(inverse) / (1 / inverse).sum() / inverse
    return replace(
        model,
        # s x with α / s² predict the same; lengths are estimates now, and bound no noise.
        rows=model.rows * squares.sqrt()[:, None],
        alpha=model.alpha / squares[:, None],
        bound=math.inf,
    )


_WEIGHTS = (0.3, 1.0, 3.0, 10.0, 1e6)
"""Numbers of a class's rows that the mean of all rows may weigh as much as; the last: all alike."""

_LINEAR = 1e-4
"""Standard deviation assumed where an exact equation is compared with a linear approximation."""


@dataclass(frozen=True, kw_only=True)
class KernelPosterior:
    """Computes the posterior of the missing row, with which no known row was matched."""

    matched: Matched
    learned: bool  # whether the prior is fitted to the others; else any unit vector is as likely
    alpha: bool  # whether the coefficients α̃ are used beside the rows X̃

    def scale_rows(self, rows: Tensor) -> Tensor:
        """Scales down rows (n, d + c) whose d features are longer than 1; the classes stay."""
        d = self.matched.model.rows.shape[1]
        norm = torch.linalg.vector_norm(rows[:, :d], dim=1, keepdim=True).clamp_min(1)
        return torch.cat([rows[:, :d] / norm, rows[:, d:]], dim=1)

    def released_row(self) -> Tensor:
        """Returns the released row itself and its classes' probabilities: (d + c,)."""
        return torch.cat([self.matched.model.rows[-1], self._classes])

    def mean(self, maxima: Sequence[Tensor], samples: int, rng: torch.Generator) -> Tensor:
        """Estimates the posterior mean (d + c,) from `samples` draws; `maxima` is not used."""
        row = _posterior_mean(self.matched, self._prior, self.alpha, samples, rng)
        return self.scale_rows(torch.cat([row, self._classes])[None])[0]

    @property
    def _prior(self) -> ClassPrior:
        return class_prior(self.matched.others, self.matched.model.rows.shape[1], self.learned)

    @property
    def _classes(self) -> Tensor:
        return self.matched.model.labels[-1] if self.alpha else self._prior.shares


@dataclass(frozen=True, kw_only=True)
class ClassPrior:
    """Holds a normal distribution of each class's features, and the shares of the classes."""

    means: Tensor  # (c, d): mean features of each class
    covariance: Tensor  # (d, d): covariance within a class, the same for all
    shares: Tensor  # (c,): share of the rows in each class

    def marginal(self) -> tuple[Tensor, Tensor]:
        """Computes mean (d,) and covariance (d, d) of the features over all classes."""
        mean = self.shares @ self.means
        deviation = self.means - mean
        return mean, self.covariance + (deviation.T * self.shares) @ deviation


@dataclass(frozen=True, kw_only=True)
class _Equations:
    """Values of K(x_j, x) that α̃ determines, with normal errors, for the others x_j."""

    rows: Tensor  # (m, d): the other rows x_j
    kernel: Tensor  # (d, d) matrix S of the kernel
    values: Tensor  # (m,): values of K(x_j, x), up to those errors
    precision: Tensor  # (m, m) inverse of the errors' covariance

    def linear(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Computes K(x_j, x) of all m rows x_j, (m,), and its slopes (m, d), at x = `row` (d,)."""
        inner, smooth = self.rows @ row, self.rows @ (self.kernel @ row)
        slopes = smooth[:, None] * self.rows + inner[:, None] * (self.rows @ self.kernel)
        return inner * smooth, slopes


def class_prior(others: Tensor, dimension: int, learned: bool) -> ClassPrior:
    """Makes the prior of `dimension` features, fitted to `others` (m, d + c) if `learned`."""
    features, labels = others[:, :dimension], others[:, dimension:]
    c = labels.shape[1]
    any_direction = torch.eye(dimension, dtype=torch.float64) / dimension
    if not learned or len(others) < 2:
        means = torch.zeros(c, dimension, dtype=torch.float64)
        shares = torch.full((c,), 1 / c, dtype=torch.float64)
        return ClassPrior(means=means, covariance=any_direction, shares=shares)
    from sklearn.covariance import ledoit_wolf

    # A class's mean is drawn towards that of all rows, by how much predicts each row best.
    total, sums, counts = features.sum(0), labels.T @ features, labels.sum(0)
    rest = (total - features) / (len(others) - 1)
    residuals = []
    # Each row is predicted from the rest alone: its own part is taken off both means.
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
        # One more row, shared by all classes, leaves none of them impossible.
        shares=(counts + 1 / c) / (len(others) + 1),
    )


def _derive_equations(matched: Matched, row: Tensor) -> _Equations | None:
    """Derives values K(x_j, x) from α̃ for x near `row` (d,); None where α̃ tells none."""
    model, (m, d) = matched.model, (len(matched.others), len(row))
    # Coefficients are of one client's rows; without draws α̃ is Y / λ and tells nothing of K.
    if model.clients > 1 or model.draws == 0 or m == 0:
        return None
    known = matched.others[:, :d]
    every = torch.cat([known, row[None]])
    inner = every @ every.T
    gram = inner * (every @ model.kernel @ every.T)
    gram = gram + model.lift * torch.eye(m + 1, dtype=gram.dtype)
    # Sampling adds to (K̃ + λ I) α̃ u an error of variance u'α̃'K α̃ u: least for this mixture u.
    spread = model.alpha.T @ gram @ model.alpha
    target = model.alpha[-1]
    mixture = torch.linalg.lstsq(spread, target[:, None], driver="gelsd").solution[:, 0]
    # Weight 1 at the target: the equations hold K(x_j, x) itself, unscaled.
    mixture = mixture / (target @ mixture)
    weights = model.alpha @ mixture
    values = model.labels @ mixture - model.ridge * weights
    # What the known rows add is computed and taken off, which leaves K(x_j, x).
    values = values[:-1] - gram[:-1, :-1] @ weights[:-1]
    along = (gram @ weights)[:-1]
    # Covariance of K̃ w for a Wishart K̃ of k draws: (K w'K w + K w w'K) / k.
    errors = gram[:-1, :-1] * (weights @ gram @ weights) + torch.outer(along, along)
    exact = _LINEAR**2 * torch.eye(m, dtype=gram.dtype)
    covariance = errors / model.draws + exact
    return _Equations(
        rows=known,
        kernel=model.kernel,
        values=values,
        precision=torch.cholesky_inverse(torch.linalg.cholesky(covariance)),
    )


def _posterior_mean(
    matched: Matched, prior: ClassPrior, alpha: bool, samples: int, generator: torch.Generator
) -> Tensor:
    """Estimates the missing row's features (d,), the mean of their posterior, by Gibbs sampling."""
    model = matched.model
    released = model.rows[-1]
    if not model.scale:
        return released
    mean, covariance = prior.marginal()
    if alpha:
        mean, covariance = model.labels[-1] @ prior.means, prior.covariance
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    pull = precision @ mean
    # The variances start at the Laplace noise's own, 2 b².
    noise = torch.full_like(released, model.variance())
    row = torch.linalg.solve(precision + (1 / noise).diag(), pull + released / noise)
    exact = _derive_equations(matched, row) if alpha else None
    total = torch.zeros_like(released)
    burn_in = max(20, samples // 5)
    for draw in range(burn_in + samples):
        inverse = 1 / noise
        # Given the variances x is normal: precisions of prior, noise and linearized equations add.
        own, right = precision + inverse.diag(), pull + released * inverse
        if exact:
            values, slopes = exact.linear(row)
            weighted = slopes.T @ exact.precision
            own = own + weighted @ slopes
            right = right + weighted @ (exact.values - values + slopes @ row)
        lower = torch.linalg.cholesky(own)
        center = torch.cholesky_solve(right[:, None], lower)[:, 0]
        step = torch.randn(len(released), 1, generator=generator, dtype=torch.float64)
        # White noise through L'⁻¹ has the covariance (L L')⁻¹.
        row = center + torch.linalg.solve_triangular(lower.T, step, upper=True)[:, 0]
        noise = 1 / _inverse_variances((released - row).abs(), model.scale, generator)
        # Averaging the conditional means and not the draws takes out their own noise (Rao-
        # Blackwell).
        if draw >= burn_in:
            total += center
    mean_row = total / samples
    # The sampler knows no bound of the noise; the row is within it.
    return released + (mean_row - released).clamp(-model.bound, model.bound)


def _inverse_variances(size: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Draws the inverse variances of normal noise from their posterior, given its `size` |e|."""
    # Inverse Gaussian of mean 1 / (b |e|) and shape 1 / b² (Michael, Schucany and Haas, 1976).
    # An error of exactly 0 would have an infinite mean.
    mean = 1 / (scale * size.clamp_min(1e-9 * scale))
    shape = 1 / scale**2
    chi = torch.randn(size.shape, generator=generator, dtype=torch.float64).square()
    ratio = mean * chi / (2 * shape)
    # The smaller root, without the cancellation of 1 + ratio - sqrt(ratio (2 + ratio)).
    root = mean / (1 + ratio + (ratio * (2 + ratio)).sqrt())
    share = torch.rand(size.shape, generator=generator, dtype=torch.float64)
    # The other root, mean² / root, has the probability that is left.
    return torch.where(share <= mean / (mean + root), root, mean.square() / root)


def log_normal(rows: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Evaluates the log density (n,) of the normal distribution at `rows` (n, d)."""
    lower: Tensor = torch.linalg.cholesky(covariance)
    inner: Tensor = torch.linalg.solve_triangular(lower, (rows - mean).T, upper=False)
    level = lower.diagonal().log().sum() + len(mean) / 2 * math.log(2 * math.pi)
    return -inner.square().sum(0) / 2 - level
