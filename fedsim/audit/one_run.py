"""One run of a federation whose data are canaries, each by a coin of its own.

The run goes through the code that clients run, as scheduled. An attacker who knows all but coins
and noise then says of each canary how much of it the server saw (Steinke, Nasr and Jagielski,
Privacy Auditing with One (1) Training Run, NeurIPS 2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim import rng
from fedsim.audit.contribution import Contributions, images, other_label
from fedsim.models.local import mean_gradient_factor
from fedsim.training.client import Client
from fedsim.training.workload import Workload
from fedsim.types import Relation, Tensors, Unit, Update

_SKETCHED = 1 << 15
"""Longer contributions are compared by so many sums of their entries with random signs."""
_NEGLIGIBLE = 1e-6
"""A direction of rows with less of the strongest one's energy is none: rows are float32."""
_ROUNDING = 1e-12
"""Share of a vector's energy below which noise is the rounding of its float32 entries."""


def scores(
    workload: Workload,
    unit: Unit,
    relation: Relation,
    canaries: int,
    on_progress: Callable[[int, int], None],
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Runs the federation once with canaries; returns their scores and coins, (m,) each.

    Both are arguments of `bounds.one_run_bound`: True is a canary that is present. Canaries are
    ordered by their clients' numbers. It fails as `Client.update`.

    Args:
        workload: the federation.
        unit: what the claim hides, an `example`, or a `client`: then each client is a canary, and
            `relation` and `canaries` do not matter.
        relation: `replace_one` if the coin of an example exchanges its label; otherwise it decides
            whether it is there.
        canaries: the most examples that are canaries. Each client has an equal share, if it holds
            as many; where clients are more, the first have one each.
        on_progress: called with (rounds done, all rounds).
    """
    cast: _Cast
    cast = _Clients(workload) if unit == "client" else _Examples(workload, relation, canaries)
    seen: dict[int, Tensor] = {}
    states: dict[int, Tensors] = {}
    rounds = workload.scenario.training.rounds
    for round in range(1, rounds + 1):
        sent: dict[int, Tensors] = {}
        for client in workload.plan(round).participants:
            sent[client], states[client] = cast.release(client, round, states.get(client, {}))
        if workload.stack.aggregation is not None:
            updates = [Update(tensors=sent[client], num_examples=1) for client in sorted(sent)]
            sent = {_ALL: workload.combine_updates(updates, round).tensors}
        for viewed, update in sent.items():
            # Every round starts from the same model, where a canary
            # contributes the same: the sum says it all.
            seen[viewed] = seen.get(viewed, 0) + cast.sign * cast.flat(update)
        on_progress(round, rounds)
    return cast.score_canaries(seen), cast.coins.numpy()


_ALL = -1
"""Stands for the sender of the aggregate."""


class _Cast(ABC):
    """The canaries of a run, client by client."""

    sign = 1.0
    """Sign that turns what a client sends into the direction of its canaries' contributions."""

    def __init__(self, workload: Workload, owners: list[int]) -> None:
        self.workload = workload
        self.seed = rng.derive(workload.scenario.seed, "canary", "run")
        self.owners = torch.tensor(owners)
        """(m,) numbers of the clients that the canaries belong to, ascending."""
        stream = rng.generator(self.seed, "coins")
        self.coins = torch.rand(len(owners), generator=stream) < 0.5
        """(m,) whether each canary is in the world that is called present."""
        self.contributions = Contributions(workload)
        self.start = self.contributions.start
        entries = sum(value.numel() for value in self.start[0].values())
        stream = rng.generator(self.seed, "sketch")
        # Drawn once: rows can only be compared in one and the same sketch.
        self._sums = torch.randint(_SKETCHED, (entries,), generator=stream)
        self._signs = 2.0 * torch.randint(2, (entries,), generator=stream) - 1

    @abstractmethod
    def release(self, client: int, round: int, state: Tensors) -> tuple[Tensors, Tensors]:
        """Returns what `client` sends in `round`, and the client's state afterwards."""

    @abstractmethod
    def contribution_rows(self, canaries: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rows (any, k + 1) of `row` for canaries (c,): decided by their coins, certain."""

    def row(self, update: Tensors, vector: Tensor) -> Tensor:
        """Returns (k + 1,): a sketch of k numbers of `update`, and its product with `vector`."""
        entries = self.flat(update)
        # Only rows are compared by sketches: noise on the vector would weigh more in a sketch.
        sketch = entries
        if len(entries) > _SKETCHED:
            # A count sketch: inner products of sketches are those of the entries on average.
            sketch = torch.zeros(_SKETCHED).index_add_(0, self._sums, self._signs * entries)
        inner = torch.dot(entries.double(), vector.double())
        return torch.cat([sketch.double(), inner[None]])

    def flat(self, update: Tensors) -> Tensor:
        """Returns all tensors of `update` as one vector (entries,) of float32."""
        return torch.cat([update[name].flatten() for name in self.start[0]]).float()

    def score_canaries(self, seen: dict[int, Tensor]) -> NDArray[np.float64]:
        """Computes (m,) scores: how much of each canary is in what the server saw, by client."""
        found = torch.zeros(len(self.owners), dtype=torch.float64)
        parts = []
        for client, vector in seen.items():
            canaries = torch.nonzero((self.owners == client) | (client == _ALL))[:, 0]
            if len(canaries):
                parts.append(
                    (canaries, _CanaryRegression(vector, *self.contribution_rows(canaries, vector)))
                )
        # One scale for all vectors: a single client may have too few canaries to tell it.
        scale = _fit_scale([part for _, part in parts])
        for canaries, part in parts:
            found[canaries] = part.weights(scale)[: len(canaries)]
        return found.numpy()


class _Clients(_Cast):
    """Each client is a canary: it sends an update of twice the bound, or of zeros."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, list(range(len(workload.parts))))

    def release(self, client: int, round: int, state: Tensors) -> tuple[Tensors, Tensors]:
        stack = self.workload.stack
        own = self.contributions.client_update(client)
        update = {name: int(self.coins[client]) * value for name, value in own.items()}
        state = state or stack.init(update, self.workload.declared)
        return stack.apply(update, state, rng.generator(self.seed, "noise", round, client))

    def contribution_rows(self, canaries: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self.row(self.contributions.client_update(c), vector) for c in canaries.tolist()]
        return torch.stack(rows), torch.zeros(0, len(rows[0]))


class _Examples(_Cast):
    """A share of each client's examples are canaries; the others are alike, or not there at all."""

    def __init__(self, workload: Workload, relation: Relation, canaries: int) -> None:
        share = max(1, canaries // len(workload.parts))
        chosen = [part[:share] for part in workload.parts][:canaries]
        super().__init__(workload, [c for c, own in enumerate(chosen) for _ in own])
        self.sign = mean_gradient_factor(workload.training)
        self.examples = torch.cat(chosen)
        self.replaced = relation == "replace_one"
        self.others = [part[share:] for part in workload.parts]
        data = images(workload)
        shown, labels = data.train_images.clone(), data.train_labels.clone()
        self.labels = labels[self.examples]
        """(m,) labels of the canaries where they are absent; present, they have `other_label`s."""
        exchanged = other_label(data, self.labels)
        if self.replaced:
            labels[self.examples] = torch.where(self.coins, exchanged, self.labels)
            for others in self.others:
                # The others become copies of one example, which the attacker knows how to take out.
                shown[others] = shown[others[:1]]
                labels[others] = labels[others[:1]]
        else:
            labels[self.examples] = exchanged
        self.data = replace(data, train_images=shown, train_labels=labels)
        self.run = workload.of_neighbours(self.data)
        # The rest of the run knows nothing of coins: they are in the data, or in who is absent.
        self.clients = [self._apply_coins(client) for client in self.run.clients]

    def _apply_coins(self, client: Client) -> Client:
        if self.replaced:
            return replace(client, seed=self.seed)
        there = torch.isin(client.own, self.examples[self.coins])
        return replace(client, seed=self.seed, absent=client.own[~there])

    def release(self, client: int, round: int, state: Tensors) -> tuple[Tensors, Tensors]:
        result = self.clients[client].update(self.run, round, *self.start, state)
        return result.update.tensors, result.state

    def contribution_rows(self, canaries: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        examples, labels = self.examples[canaries], self.labels[canaries]
        present = self._gradients(examples, other_label(self.data, labels), vector)
        if not self.replaced:
            return present, present[:0]
        absent = self._gradients(examples, labels, vector)
        others = [self.others[c] for c in sorted(set(self.owners[canaries].tolist()))]
        # All others of a client are alike, so that one gradient stands for all of them.
        copies = [
            len(own) * self._gradients(own[:1], self.data.train_labels[own[:1]], vector)
            for own in others
            if len(own)
        ]
        # The coin decides on plus or minus half the difference
        # around the mean, which is there anyway.
        return present - absent, torch.cat([(present + absent) / 2, *copies])

    def _gradients(self, examples: Tensor, labels: Tensor, vector: Tensor) -> Tensor:
        """Returns (n, k + 1) rows of `row`, one for each example."""
        pixels = self.data.train_images
        rows = [
            self.row(self.contributions.unit_gradient(pixels[[example]], label), vector)
            for example, label in zip(examples.tolist(), labels, strict=True)
        ]
        return torch.stack(rows)


class _CanaryRegression:
    """A vector as a sum of rows with normal weights, and of noise, by sufficient statistics."""

    def __init__(self, vector: Tensor, decided: Tensor, certain: Tensor) -> None:
        rows = torch.cat([decided, certain]).double()
        self.energy = float(vector.double().square().sum())
        self.rounding = _ROUNDING * self.energy
        self.entries = len(vector)
        # What is certain is in the vector whatever the coins, times an unknown factor, and is taken
        # out of all. Its rows have weights all the same: what is sampled is there more often or
        # less.
        mean = certain.double().sum(0)
        # The last entry is an inner product with the vector: it
        # goes through every projection as a row does.
        length = float(torch.linalg.vector_norm(mean[:-1]))
        if length > 0:
            mean = mean / length
            rows = rows - torch.outer(rows[:, :-1] @ mean[:-1], mean)
            self.energy -= float(mean[-1]) ** 2
        # The mean itself is left without length, and what is along it is rounding.
        # The Gram matrix has a row for each canary, where the covariance would have one for each
        # entry.
        spectrum, vectors = torch.linalg.eigh(rows[:, :-1] @ rows[:, :-1].T)
        told = spectrum > _NEGLIGIBLE * spectrum.max()
        self.spectrum, self._vectors = spectrum[told], vectors[:, told]
        self.projected = self._vectors.T @ rows[:, -1]

    def weights(self, scale: float) -> Tensor:
        """Computes the posterior means of the rows' weights, those of the canaries first."""
        # The posterior mean s (s K + 1)^-1 R v of K = R R', by the eigenvalues of K.
        shrunk = scale / (scale * self.spectrum + 1)
        return torch.mv(self._vectors, shrunk * self.projected)


def _fit_scale(parts: list[_CanaryRegression]) -> float:
    """Returns the scale of weights at which all vectors are likeliest (empirical Bayes)."""
    spectrum = torch.cat([part.spectrum for part in parts])
    projected = torch.cat([part.projected for part in parts])
    energy, entries = sum(part.energy for part in parts), sum(part.entries for part in parts)
    rounding = sum(part.rounding for part in parts)
    if not len(spectrum):
        return 0.0
    scales = torch.logspace(-6, 12, 181, dtype=torch.float64) / spectrum.max()

    def cost(scale: Tensor) -> float:
        shrunk = scale / (scale * spectrum + 1)
        # -2 log likelihood, up to constants, with the noise's variance at its own maximum.
        noise = (energy - (shrunk * projected.square()).sum()).clamp(min=rounding) / entries
        return float(torch.log1p(scale * spectrum).sum() + entries * torch.log(noise))

    return float(min(scales, key=cost))
