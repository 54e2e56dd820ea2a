"""Fit of the gradients of examples to an update, which says who is part of it.

An update is about a weighted sum of the gradients g_i of what clients trained on, at the weights
that were sent, plus what the weights moved meanwhile, plus declared noise. The mean gradient v of
an update is fitted by `InnerProducts.fit`. An example that is asked about is there with a given
chance. Members that are not asked about are taken for examples like the public ones, or like
those asked about where none are granted. How many they are, and how much the weights moved, are
chosen where v is likeliest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.types import Observation, as_pixels
from fedsim_attacks.membership._example_gradients import ExampleGradients
from fedsim_attacks.membership._gaussian_fit import GaussianFit, InnerProducts

_DRIFTS = (0.02, 0.1, 0.4)
"""Energy of what the weights moved, over that of the gradients' sum, that is tried."""
_ROUNDING = 1e-6
"""The same where an update is a single gradient: float32 rounds it."""
_OTHERS = (0.0, 1.0, 8.0)
"""Numbers of members that are not asked about, over that of members among those, that are tried."""


@dataclass(frozen=True, kw_only=True)
class PresenceFit:
    """Holds what a fit to one update says of each example that is asked about."""

    scores: Tensor
    """(n,) score test of the example's part in the sum; about unit spread without a part."""
    evidence: Tensor
    """(n,) log-likelihood ratio of the example being part of the sum, over its absence."""
    loss: float
    """Mean negative log-likelihood of an entry of the update."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Holds the moments of the examples' coefficients in the mean gradient."""

    mean: Tensor
    """(N,) means over presence, too."""
    spread: Tensor
    """(N,) variances over presence, too."""
    member: float
    """Mean of the coefficient of a member."""
    member_spread: float
    """Variance of the coefficient of a member."""


def append_public(
    inputs: Tensor, labels: Tensor, known: Knowledge, most: int
) -> tuple[Tensor, ...]:
    """Returns `inputs` and `labels`, and behind them those of at most `most` public examples."""
    if known.public_images is None or known.public_labels is None:
        return inputs, labels
    shown = as_pixels(known.public_images[:most])
    return torch.cat([inputs, shown]), torch.cat([labels, known.public_labels[:most]])


def fit_presence(
    seen: Observation, inputs: Tensor, labels: Tensor, asked: int, chance: float | Tensor = 0.5
) -> PresenceFit:
    """Fits the first `asked` of the examples to one update.

    Args:
        seen: The update.
        inputs: (N, ...) pixels or entries of rows; public examples follow those asked about.
        labels: (N,) int64.
        asked: Number of examples that are asked about.
        chance: Probability, below 1, that such an example is part of the update, or (asked,) one of
            each.

    Raises:
        AttackFailed: all gradients are 0.
    """
    # The defense removed entries of the update, so that they are left out of gradients, too.
    kept = {n: t != 0 for n, t in seen.update.items()} if seen.effect.removed else None
    gradients = ExampleGradients(seen, kept)
    rows = gradients.of(inputs, labels)
    vector = gradients.vector(seen.update) * mean_gradient_factor(seen.training)
    # The fits below cost as much as examples have inner products, whatever the model's size.
    products = InnerProducts(
        gram=(rows @ rows.T).double(),
        inner=(rows @ vector).double(),
        energy=float(vector.double().square().sum()),
        entries=int(sum(t.sum() for t in kept.values())) if kept else vector.numel(),
    )
    if not products.gram.any():
        raise AttackFailed("the gradients of all candidates are 0")
    variance = _noise_variance(seen)
    # After one step all gradients are of the same weights. With several, weights move, and
    # gradients leave the span of those that are computed here.
    one_step = seen.training.steps == 1
    chances = torch.as_tensor(chance, dtype=torch.float64).expand(asked)
    best: tuple[float, tuple[InnerProducts, _Weights, float]] | None = None
    for others in _OTHERS:
        weights = _expect_weights(seen, len(labels), others, chances)
        for drift in (_ROUNDING,) if one_step else _DRIFTS:
            at, noise, scale = _scaled(products, weights, drift, variance)
            found = at.fit(weights.mean, weights.spread, noise, scored=False).log_likelihood
            # The density of v itself, which is comparable: that of v / scale is larger by scale^P.
            found -= products.entries * math.log(scale)
            if best is None or found > best[0]:
                best = found, (at, weights, noise)
    assert best is not None
    at, weights, noise = best[1]
    fit = at.fit(weights.mean, weights.spread, noise, scored=True)
    return PresenceFit(
        scores=fit.scores[:asked],
        evidence=_compute_evidence(fit, weights, _estimate_excess(fit.scores[:asked]))[:asked],
        loss=-best[0] / products.entries,
    )


def _estimate_excess(scores: Tensor) -> float:
    """Returns the variance of `scores` over 1, which it has where the model holds; at least 1.

    What the weights moved lies along few directions, and scores of examples there are larger.
    """
    # The median, so that the large scores of members do not count as noise.
    return max(1.0, float(scores.abs().median() / 0.6745) ** 2)


def _compute_evidence(fit: GaussianFit, weights: _Weights, excess: float) -> Tensor:
    """Returns log p(v | i takes part) - log p(v | it does not) for each example i.

    The coefficient is normal with moments μ and τ of a member, or else 0. With
    T = g_i' C_i^-1 (x + m_i g_i) and the precision r, v has the density ratio
    ∫ N(a; μ, τ) exp(a T - a² r / 2) da. C_i is taken for `excess` times as large as fitted.
    """
    r, mean, spread = fit.precisions / excess, weights.member, weights.member_spread
    # The score is of x, from which the example's own mean was taken, too.
    towards = fit.scores * (r / excess).sqrt() + weights.mean * r
    wide = 1 + spread * r
    found: Tensor = (spread * towards**2 + 2 * mean * towards - mean**2 * r) / (2 * wide)
    return found - wide.log() / 2


def _expect_weights(seen: Observation, examples: int, others: float, chance: Tensor) -> _Weights:
    """Returns the moments of coefficients in the mean gradient.

    Args:
        seen: The update.
        examples: Number of examples that are asked about, and of public ones behind them.
        others: Number of members that are not asked about, over that of those that are.
        chance: (asked,) float64 probability that each example that is asked about is a member.
    """
    asked, inside = len(chance), float(chance.sum())
    members = inside * (1 + others)
    draws = seen.training.batch_size * seen.training.steps * seen.num_clients
    # Dealt examples take part alike; else the number of times that one is drawn is binomial.
    dealt = seen.training.sampling == "balls_in_bins"
    # E a² of a member: its squared share, and the variance of how often it is drawn.
    square = 1 / members**2 + (0.0 if dealt else 1 / (members * draws))
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
    return _Weights(
        mean=mean, spread=spread, member=1 / members, member_spread=square - 1 / members**2
    )


def _scaled(
    products: InnerProducts, weights: _Weights, drift: float, variance: float
) -> tuple[InnerProducts, float, float]:
    """Returns products of the vector over a scale, the noise in its units, and that scale.

    The scale gives the vector the energy that the model expects: clipping, signs and other factors
    that only a client knows change a length and hardly a direction.
    """
    mean = weights.mean
    expected = float(weights.spread @ products.gram.diagonal())
    expected += float(mean @ products.gram @ mean)
    # Noise may have more energy than what was observed; then little but noise is left.
    signal = max(products.energy - products.entries * variance, 1e-3 * products.energy)
    scale = math.sqrt(signal / (expected * (1 + drift)))
    noise = drift * expected / products.entries + variance / scale**2
    at = InnerProducts(
        gram=products.gram,
        inner=products.inner / scale,
        energy=products.energy / scale**2,
        entries=products.entries,
    )
    return at, noise, scale


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
