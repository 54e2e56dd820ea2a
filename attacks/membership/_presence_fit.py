"""Fit of the gradients of examples to an update, which says who is part of it.

An update is about a weighted sum of the gradients g_i of what clients trained on, at the weights
that were sent, plus what the weights moved meanwhile, plus declared noise: v = Σ a_i g_i + ε. The
a_i are independent with means m_i and variances d_i, and ε is normal with variance s in each of P
entries. An example that is asked about is there with a given chance. Other members are taken for
examples like the public ones, or like those asked about where none are granted. How many they are,
and how much the weights moved, are chosen where v is likeliest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.types import Observation, as_pixels
from fedsim_attacks.membership._measures import AskedExamples, ExampleGradients


@dataclass(frozen=True, kw_only=True)
class _GaussianFit:
    scores: Tensor
    """(n,) score test of a_i > m_i: g_i' C_i^-1 x / (g_i' C_i^-1 g_i)^(1/2), or 0 where g_i is 0,
    of x = v - Σ m_j g_j and the covariance C_i of v without the term of i."""
    precisions: Tensor  # (n,) g_i' C_i^-1 g_i, the inverse variance of an estimate of a_i
    log_likelihood: float  # log-likelihood of v, up to a constant that depends on P alone


@dataclass(frozen=True, kw_only=True)
class _InnerProducts:
    """Holds what the model needs to know of the gradients and of the vector."""

    gram: Tensor  # (n, n) float64: A, the inner products g_i' g_j of the gradients
    inner: Tensor  # (n,) float64: b, the inner products g_i' v of the gradients and the vector
    energy: float  # |v|²
    entries: int  # P, the number of entries that are compared

    def fit(self, mean: Tensor, variance: Tensor, noise: float, *, scored: bool) -> _GaussianFit:
        """Fits a_i of prior `mean`, `variance` > 0 (n,) and `noise` s > 0; scores if `scored`."""
        # With D = diag(d) and M = I + D^(1/2) A D^(1/2) / s, whose size is n and not P, Woodbury's
        # identity gives both the likelihood and q = D^(1/2) G C^-1 x.
        root = variance.sqrt()
        whitened = root[:, None] * self.gram * root / noise
        whitened.diagonal().add_(1.0)
        factor = torch.linalg.cholesky(whitened)
        towards = torch.mv(self.gram, mean)
        # D^(1/2) G x / s, which M^-1 takes to q.
        right = root * (self.inner - towards) / noise
        solved = torch.cholesky_solve(right[:, None], factor)[:, 0]
        # |x|² without x, whose size is P.
        rest = self.energy - 2 * float(mean @ self.inner) + float(mean @ towards)
        misfit = rest / noise - float(right @ solved)
        # |C| = s^P |M|, and |M| is the squared product of its Cholesky factor's diagonal.
        determinant = self.entries * math.log(noise) + 2 * float(factor.diagonal().log().sum())
        scores = precisions = solved[:0]
        if scored:
            inverse = torch.cholesky_inverse(factor).diagonal()
            # Leaving term i out of C divides by (M^-1)_ii; what is left is 0 for a gradient of 0.
            spread = inverse * (1 - inverse)
            scores = torch.where(spread > 1e-12, solved / spread.clamp(min=1e-12).sqrt(), 0.0)
            # (M^-1)_ii = 1 / (1 + d_i g_i' C_i^-1 g_i), by the same identity.
            precisions = torch.where(spread > 1e-12, (1 / inverse - 1) / variance, 0.0)
        return _GaussianFit(
            scores=scores, precisions=precisions, log_likelihood=-(misfit + determinant) / 2
        )


# Energy of what the weights moved across gradients, over that of their sum; the first one first.
_DRIFTS = (0.1, 0.02, 0.4)
# Variance of each coefficient by what the weights moved along gradients, over a member's squared.
_MOVES = (1.0, 0.1, 10.0)
_ROUNDING = 1e-6  # the drift where an update is a single gradient: float32 rounds it
_OTHERS = (0.0, 1.0, 8.0)
"""Numbers of members that are not asked about, over that of members among those, that are tried."""


@dataclass(frozen=True, kw_only=True)
class PresenceFit:
    """Holds what a fit to one update says of each example that is asked about."""

    scores: Tensor
    """(n,) score test of the example's part in the sum; spread at most about 1 without a part."""
    evidence: Tensor
    """(n,) log-likelihood ratio of the example being part of the sum, over its absence."""
    loss: float  # mean negative log-likelihood of an entry of the update


@dataclass(frozen=True, kw_only=True)
class _Weights:
    mean: Tensor  # (N,) means over presence, too
    spread: Tensor  # (N,) variances over presence, too
    member: float  # mean of the coefficient of a member
    member_spread: float  # variance of the coefficient of a member


def append_public(asked: AskedExamples, known: Knowledge, most: int) -> AskedExamples:
    """Returns the examples `asked` about and, behind them, at most `most` public ones, if known."""
    if known.public_images is None or known.public_labels is None:
        return asked
    shown = as_pixels(known.public_images[:most])
    return torch.cat([asked[0], shown]), torch.cat([asked[1], known.public_labels[:most]])


def fit_presence(
    seen: Observation, examples: AskedExamples, asked: int, chance: float | Tensor = 0.5
) -> PresenceFit:
    """Fits the gradients of examples to one update; AttackFailed if all of them are 0.

    Args:
        seen: the update.
        examples: those asked about, and behind them public ones, as `append_public` returns them.
        asked: number of examples that are asked about.
        chance: probability below 1 that each of these took part; or one of each, (asked,).
    """
    # The defense removed entries of the update, so that they are left out of gradients, too.
    kept = {n: t != 0 for n, t in seen.update.items()} if seen.effect.removed else None
    gradients = ExampleGradients(seen, kept)
    rows = gradients.of(examples)
    vector = gradients.vector(seen.update) * mean_gradient_factor(seen.training)
    # The fits below cost as much as examples have inner products, whatever the model's size.
    products = _InnerProducts(
        gram=(rows @ rows.T).double(),
        inner=(rows @ vector).double(),
        energy=float(vector.double().square().sum()),
        entries=int(sum(t.sum() for t in kept.values())) if kept else vector.numel(),
    )
    if not products.gram.any():
        raise AttackFailed("the gradients of all candidates are 0")
    variance = _noise_variance(seen)
    # After one step all gradients are of the same weights. With several, weights move, and so do
    # gradients: mostly within the span of those that are computed here, and a little out of it.
    one_step = seen.training.steps == 1
    moves, drifts = ((0.0,), (_ROUNDING,)) if one_step else (_MOVES, _DRIFTS)
    chances = torch.as_tensor(chance, dtype=torch.float64).expand(asked)

    @cache
    def at(others: float, move: float, drift: float) -> _Scaled:
        weights = _expect_weights(seen, len(rows), others, chances, move)
        return _Scaled.of(products, weights, drift, variance)

    # One after the other, since each fit takes the cube of the number of examples.
    chosen = [_OTHERS[0], moves[0], drifts[0]]
    for place, values in enumerate((_OTHERS, moves, drifts)):
        tried = [(*chosen[:place], value, *chosen[place + 1 :]) for value in values]
        chosen = [*max(tried, key=lambda each: at(*each).log_likelihood)]
    best = at(*chosen)
    fit = best.fit()
    excess = _estimate_excess(fit.scores[:asked])
    return PresenceFit(
        # Ranks of a round stay, and rounds count alike.
        scores=fit.scores[:asked] / math.sqrt(1.0 if one_step else excess),
        evidence=_compute_evidence(fit, best.weights, excess)[:asked],
        loss=-best.log_likelihood / products.entries,
    )


def _estimate_excess(scores: Tensor) -> float:
    """Returns the variance of `scores` over 1, which it has where the model holds; at least 1."""
    # What the weights moved lies along few directions, and scores of examples there are larger.
    # The median, so that the large scores of members do not count as noise.
    return max(1.0, float(scores.abs().median() / 0.6745) ** 2)


def _compute_evidence(fit: _GaussianFit, weights: _Weights, excess: float) -> Tensor:
    """Returns log p(v | i takes part) - log p(v | it does not) for each example i."""
    # ∫ N(a; μ, τ) exp(a T - a² r / 2) da, with T = g_i' C_i^-1 (x + m_i g_i) and the precision r.
    r, mean, spread = fit.precisions / excess, weights.member, weights.member_spread
    # The score is of x, from which the example's own mean was taken, too.
    towards = fit.scores * (r / excess).sqrt() + weights.mean * r
    wide = 1 + spread * r
    found: Tensor = (spread * towards**2 + 2 * mean * towards - mean**2 * r) / (2 * wide)
    return found - wide.log() / 2


def _expect_weights(
    seen: Observation, examples: int, others: float, chance: Tensor, move: float
) -> _Weights:
    """Returns moments of coefficients; `others` is over members among the asked, of `chance`."""
    asked, inside = len(chance), float(chance.sum())
    members = inside * (1 + others)
    draws = seen.training.batch_size * seen.training.steps * seen.num_clients
    # E a² of a member: its squared share, and the variance of how often it is drawn. Examples that
    # are dealt take part alike, but in an epoch that is cut short; else that number is binomial.
    cut = math.modf(draws / members)[0] if seen.training.sampling == "epochs" else 0.0
    dealt = seen.training.sampling in ("balls_in_bins", "epochs")
    square = 1 / members**2 + (cut * (1 - cut) / draws**2 if dealt else 1 / (members * draws))
    # Absence scales both moments by the chance; the variance is then E a² less (E a)².
    present = torch.cat([chance, chance.new_zeros(examples - asked)])
    mean = present / members
    spread = present * square - mean**2
    unknown = members - inside
    # Public examples stand for unknown members, or, where there are none, those asked about do.
    public = slice(asked, examples) if examples > asked else slice(0, asked)
    count = len(range(examples)[public])
    if examples > asked:
        # Nothing is public of a client's data, but a fit takes no variance of 0.
        spread[public] = 1e-6 * square / count
    # The sum of unknown members is as a sum of `count` alike with random weights.
    mean[public] += unknown / members / count
    spread[public] += unknown * square / count
    spread += move / members**2
    return _Weights(
        mean=mean, spread=spread, member=1 / members, member_spread=square - 1 / members**2
    )


@dataclass(frozen=True, kw_only=True)
class _Scaled:
    """Holds a model of one vector, which it divides by a scale."""

    products: _InnerProducts  # products of the vector over the scale
    weights: _Weights
    noise: float  # variance of an entry's noise, in the scale's units
    log_likelihood: float
    """Log-likelihood of the vector as it was, up to a constant that depends on P alone."""

    @classmethod
    def of(
        cls, products: _InnerProducts, weights: _Weights, drift: float, variance: float
    ) -> _Scaled:
        """Scales the vector so that its energy is the expected one, and fits it."""
        # Clipping, signs and other factors that a client knows change a length, hardly a direction.
        mean = weights.mean
        expected = float(weights.spread @ products.gram.diagonal())
        expected += float(mean @ products.gram @ mean)
        # Noise may have more energy than what was observed; then little but noise is left.
        signal = max(products.energy - products.entries * variance, 1e-3 * products.energy)
        scale = math.sqrt(signal / (expected * (1 + drift)))
        noise = drift * expected / products.entries + variance / scale**2
        scaled = _InnerProducts(
            gram=products.gram,
            inner=products.inner / scale,
            energy=products.energy / scale**2,
            entries=products.entries,
        )
        fit = scaled.fit(weights.mean, weights.spread, noise, scored=False)
        # The density of v itself, which is comparable: that of v / scale is larger by scale^P.
        likelihood = fit.log_likelihood - products.entries * math.log(scale)
        return cls(products=scaled, weights=weights, noise=noise, log_likelihood=likelihood)

    def fit(self) -> _GaussianFit:
        """Fits the vector with scores."""
        return self.products.fit(self.weights.mean, self.weights.spread, self.noise, scored=True)


def _noise_variance(seen: Observation) -> float:
    """Returns the variance of declared noise on an entry of the mean gradient; 0 if unknown."""
    weights, total = step_weights(seen.training), 0.0
    factor = mean_gradient_factor(seen.training)
    for noise in seen.effect.noise:
        if noise.on == "step":
            # Correlated steps cancel a part of it: the variance is then an upper bound.
            share = sum(w**2 for w in weights) / sum(weights) ** 2
            total += noise.variance * share / seen.num_clients
        elif noise.on == "update":
            # Each client draws its own noise, so that the mean of n has 1/n of the variance.
            total += noise.variance * factor**2 / seen.num_clients
        else:
            total += noise.variance * factor**2 / seen.num_clients**2
    return total / seen.releases
