"""Membership by the likelihood ratio of shadow clients (LiRA).

Shadow clients start each round at the weights that were observed, and train on public examples and
a random half of the candidates: there are measurements of each candidate with it and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, final

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedsim.contracts.attack import AttackFailed
from fedsim.contracts.grant import Knowledge, MembershipCandidates
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.types import Observation, Reconstruction, Tensors, as_pixels
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.membership._measures import (
    AskedExamples,
    UpdateSimilarity,
    chunk_size,
    log_odds,
    odds_of_logits,
    require_candidates,
    train_shadows,
    weights_after,
)


@final
class ShadowLikelihood(DirectAttack):
    """Scores candidates by the likelihood ratio of shadow clients that hold them, or do not.

    Shadows train as the client declared, without its defenses. Of an odd number one is left out.
    """

    takes_rows: ClassVar[bool] = True
    asked_of_candidates: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Carlini, Chien, Nasr, Song, Terzis and Tramèr, Membership Inference Attacks From First "
        "Principles, S&P 2022 (online attack, variances of all candidates together)"
    )

    shadows: Annotated[int, Field(ge=4, le=4096)] = 64
    """Number of shadow clients of each round; behind a sum, of shadow sums of as many clients as it
    has. Half of them hold a given candidate."""
    measure: Literal["log_odds", "cosine"] = "cosine"
    """`log_odds`: of the label, under the client's model, as published. `cosine`: of the gradient
    and the update, estimated by a random sketch for updates of more than 262,144 entries."""
    held: Annotated[int, Field(ge=1)] | None = None
    """Number of public examples that a shadow holds beside candidates, at most all that there are;
    the clients of a shadow sum share them. None: as many as it holds candidates."""

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sum over rounds of log-likelihood ratios, as `membership` (N,).

        An AttackFailed says that there are no candidates, that shadows lack examples, or that the
        client draws batches otherwise than without replacement.
        """
        candidates = require_candidates(knowledge)
        pool = _ShadowPool(candidates, knowledge, self.held)
        half = self.shadows // 2
        total = torch.zeros(len(candidates.labels), dtype=torch.float64)
        for seen in candidates.of_victim(observation):
            drawn = torch.rand(half, len(total), generator=rng).argsort(dim=1)
            # Shadows in pairs split the candidates: each is in exactly half of the shadows.
            coins = drawn < len(total) // 2
            coins = torch.cat([coins, ~coins])
            updates = _train(seen, pool, coins, rng)
            # Logarithms of ratios add up, as if rounds were independent.
            total += self._ratio(seen, candidates, updates, coins)
        return Reconstruction(membership=total, loss=0.0, iterations=0)

    def _ratio(
        self, seen: Observation, candidates: MembershipCandidates, updates: Tensors, coins: Tensor
    ) -> Tensor:
        """Returns log-likelihood ratios (N,) of one round, whose shadows held `coins` (S, N)."""
        asked = candidates.inputs, candidates.labels
        if self.measure == "cosine":
            measure = UpdateSimilarity(seen, asked).cosine
            own = measure(seen.update)
            each = torch.stack(
                [measure({n: u[s] for n, u in updates.items()}) for s in range(len(coins))]
            )
        else:
            own = log_odds(seen, weights_after(seen, seen.update), asked)
            each = _shadow_odds(seen, updates, asked)
        inside, outside = _moments(each, coins), _moments(each, ~coins)
        return _log_normal(own, *inside) - _log_normal(own, *outside)


class _ShadowPool:
    """Holds what shadow clients may train on: candidates first, then public examples."""

    def __init__(
        self, candidates: MembershipCandidates, knowledge: Knowledge, held: int | None
    ) -> None:
        self.inputs, self.labels = candidates.inputs, candidates.labels
        self.candidates, self.held = len(self.labels), 0
        public, classes = knowledge.public_images, knowledge.public_labels
        if public is not None and classes is not None:
            self.held = min(held or self.candidates // 2, len(classes))
            self.inputs = torch.cat([self.inputs, as_pixels(public)])
            self.labels = torch.cat([self.labels, classes])
        elif held:
            raise AttackFailed("shadows hold public examples, and none are granted (public: test)")

    def deal(self, coins: Tensor, clients: int, rng: torch.Generator) -> list[Tensor]:
        """Returns indices of examples for each of a sum's `clients` that hold `coins` (N,)."""
        # Who holds a candidate is unknown in a sum, so that each shadow draws it anew.
        owners = torch.randint(clients, (self.candidates,), generator=rng)
        public = len(self.labels) - self.candidates
        each = []
        for client in range(clients):
            own = (coins & (owners == client)).nonzero().flatten()
            # Rounded up: no client of a sum goes without where `held` is at least 1.
            drawn = torch.randperm(public, generator=rng)[: -(-self.held // clients)]
            each.append(torch.cat([own, self.candidates + drawn]))
        return each


def _train(seen: Observation, pool: _ShadowPool, coins: Tensor, rng: torch.Generator) -> Tensors:
    """Returns the updates (S, ...) of shadows that hold the candidates that `coins` (S, N) say."""
    training, clients, size = seen.training, seen.num_clients, seen.training.batch_size
    if training.sizes_vary:
        raise AttackFailed(f"shadows draw batches of one size, and not by {training.sampling}")
    model, normal = rebuild(seen), normalize(pool.inputs, seen.model)
    distinct = training.steps if training.batches == "different" else 1
    found: list[Tensors] = []
    # Stacked weights take memory for each shadow and client, so that few train together.
    for part in torch.split(coins, chunk_size(seen)):
        own = [each for row in part for each in pool.deal(row, clients, rng)]
        least = min(map(len, own))
        if least < size:
            raise AttackFailed(
                f"a shadow client holds {least} examples, and a batch has {size}; "
                "grant public examples (public: test), or set `held`"
            )
        batches, orders = [], [*own]
        for step in range(distinct):
            drawn = []
            for client, each in enumerate(own):
                epoch = len(each) // size if training.sampling == "epochs" else 1
                if not (place := step % epoch):
                    orders[client] = each[torch.randperm(len(each), generator=rng)]
                drawn.append(orders[client][place * size : (place + 1) * size])
            chosen = torch.stack(drawn)
            batches.append((normal[chosen], pool.labels[chosen]))
        found.append(train_shadows(model, seen, batches))
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def _shadow_odds(seen: Observation, updates: Tensors, asked: AskedExamples) -> Tensor:
    model, images = rebuild(seen).eval(), normalize(asked[0], seen.model)

    def logits(update: Tensors) -> Tensor:
        state = {**seen.buffers, **weights_after(seen, update)}
        out: Tensor = functional_call(model, state, (images,))
        return out

    # In chunks, which bound the memory of the activations.
    each: Callable[[Tensors], Tensor] = torch.vmap(logits, chunk_size=8)
    with torch.no_grad():
        return odds_of_logits(each(updates).double(), asked[1])


def _moments(each: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean (N,) of the `chosen` entries of each column, and all columns' variance."""
    counts = chosen.sum(0).clamp(min=1)
    mean = (each * chosen).sum(0) / counts
    # One variance for all, since few shadows tell little of each candidate's own.
    # Each column's mean takes a degree of freedom.
    variance = ((each - mean).square() * chosen).sum() / (chosen.sum() - len(mean)).clamp(min=1)
    return mean, variance


def _log_normal(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    variance = variance.clamp(min=1e-30)
    density: Tensor = -0.5 * ((value - mean).square() / variance + variance.log())
    return density
