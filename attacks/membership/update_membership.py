"""Membership from updates, by asking whether an example's gradient is part of the sum.

An update is about a weighted sum of the gradients g_i of what the client trained on, at the weights
that were sent, plus what the weights moved meanwhile, plus declared noise. So the coefficients of
candidates tell who took part, from the first round on and before anything is overfitted. Scores
that ask whether the model knows an example (loss, cosine) take all other gradients for noise.

The mean gradient v of an update is fitted by `InnerProducts.fit`. A candidate is there with
probability 1/2. Members that are no candidates are taken for examples like the public ones, or like
the candidates where none are granted. How many they are, and how much the weights moved, are chosen
where v is likeliest. Scores of several rounds add up.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge
from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.types import Observation, Reconstruction, as_pixels
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._example_gradients import ExampleGradients
from fedsim_attacks.membership._gaussian_fit import InnerProducts
from fedsim_attacks.membership._measures import require_candidates

_DRIFTS = (0.02, 0.1, 0.4)
"""Energy of what the weights moved, over that of the gradients' sum, that is tried."""
_ROUNDING = 1e-6
"""The same where an update is a single gradient: float32 rounds it."""
_OTHERS = (0.0, 1.0, 8.0)
"""Numbers of members that are no candidates, over that of members among them, that are tried."""


@final
class UpdateMembership(DirectAttack):
    """Says of candidates whether they are part of a client's updates, or of a sum of clients."""

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    reads_truncated: ClassVar[bool] = True
    paper: ClassVar[str] = "fedsim: score test of each gradient in a Gaussian model of the update"

    public: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """Number of public examples that stand for unknown members, if any are granted."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sum over rounds of each candidate's score, scaled to about unit spread.

        Sums count by the share of the clients asked about that are part of them.

        The loss is the mean negative log-likelihood of an entry of the updates.

        Raises:
            AttackFailed: there are no candidates, or all of their gradients are 0.
        """
        candidates = require_candidates(knowledge)
        inputs, labels = candidates.inputs, candidates.labels
        if knowledge.public_images is not None and knowledge.public_labels is not None:
            shown = as_pixels(knowledge.public_images[: self.public])
            inputs = torch.cat([inputs, shown])
            labels = torch.cat([labels, knowledge.public_labels[: self.public]])
        total = torch.zeros(len(candidates.labels), dtype=torch.float64)
        rounds = candidates.of_victim(observation)
        losses, square = [], 0.0
        for seen in rounds:
            weight = _shared(seen, observation)
            if not weight:
                continue
            scores, loss = _score(seen, inputs, labels, len(total))
            total += weight * scores
            square += weight**2
            losses.append(loss)
        # Scores of those that took no part have about unit spread, and the root keeps it so.
        return Reconstruction(
            membership=total / math.sqrt(square), loss=sum(losses) / len(losses), iterations=0
        )


def _shared(seen: Observation, asked: Observation) -> float:
    """Returns the share of the clients asked about, those of `asked`, that are part of `seen`.

    A candidate's score rises by that share on average, and its spread does not, so that this is the
    weight of `seen` which tells most. It is 1 where recordings do not say who took part.
    """
    if not (seen.participants and asked.participants):
        return 1.0
    return len({*seen.participants} & {*asked.participants}) / len(asked.participants)


def _score(seen: Observation, inputs: Tensor, labels: Tensor, asked: int) -> tuple[Tensor, float]:
    """Returns scores (asked,) of the first `asked` examples in one update, and the loss.

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
    best: tuple[float, tuple[InnerProducts, Tensor, Tensor, float]] | None = None
    for others in _OTHERS:
        mean, spread = _coefficients(seen, asked, len(labels), others)
        for drift in (_ROUNDING,) if one_step else _DRIFTS:
            at, noise, scale = _scaled(products, mean, spread, drift, variance)
            found = at.fit(mean, spread, noise, scored=False).log_likelihood
            # The density of v itself, which is comparable: that of v / scale is larger by scale^P.
            found -= products.entries * math.log(scale)
            if best is None or found > best[0]:
                best = found, (at, mean, spread, noise)
    assert best is not None
    at, mean, spread, noise = best[1]
    fit = at.fit(mean, spread, noise, scored=True)
    return fit.scores[:asked], -best[0] / products.entries


def _coefficients(
    seen: Observation, asked: int, examples: int, others: float
) -> tuple[Tensor, Tensor]:
    """Returns means and variances (examples,) of coefficients in the mean gradient.

    Args:
        seen: The update.
        asked: Number of candidates, the first of the examples.
        examples: Number of candidates and public examples.
        others: Number of members that are no candidates, over that of those that are.
    """
    members = asked / 2 * (1 + others)
    draws = seen.training.batch_size * seen.training.steps * seen.num_clients
    # Dealt examples take part alike; else the number of times that one is drawn is binomial.
    dealt = seen.training.sampling == "balls_in_bins"
    # E a² of a member: its squared share, and the variance of how often it is drawn.
    square = 1 / members**2 + (0.0 if dealt else 1 / (members * draws))
    # A candidate's fair coin halves both moments; the variance is then E a² less (E a)².
    mean = torch.full((examples,), 0.5 / members, dtype=torch.float64)
    spread = torch.full((examples,), 0.5 * square - 0.25 / members**2, dtype=torch.float64)
    unknown = members - asked / 2
    # Public examples stand for unknown members, or, where there are none, the candidates do.
    public = slice(asked, examples) if examples > asked else slice(0, asked)
    count = len(range(examples)[public])
    if examples > asked:
        # Nothing is public of a client's data, but a fit takes no variance of 0.
        mean[public], spread[public] = 0.0, 1e-6 * square / count
    # The sum of unknown members is as a sum of `count` alike with random weights.
    mean[public] += unknown / members / count
    spread[public] += unknown * square / count
    return mean, spread


def _scaled(
    products: InnerProducts, mean: Tensor, spread: Tensor, drift: float, variance: float
) -> tuple[InnerProducts, float, float]:
    """Returns products of the vector over a scale, the noise in its units, and that scale.

    The scale gives the vector the energy that the model expects: clipping, signs and other factors
    that only a client knows change a length and hardly a direction.
    """
    expected = float(spread @ products.gram.diagonal()) + float(mean @ products.gram @ mean)
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
