"""One canary in many trainings of one client, and in as many it does not take part.

The sum of all that is seen along the canary decides best where noise is independent between
tensors, entries and rounds, of one deviation. A combination in which noise is less than declared,
or cancels, tells more. It is chosen on the first half of each world's trials; a bound counts the
second half alone, and so fails no more often for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedsim import rng
from fedsim.audit.bounds import LEAST_DRAWS, mu_bound
from fedsim.audit.contribution import Contributions, along, images, other_label
from fedsim.contracts.defense import NoisyAggregation, all_finite, global_norm
from fedsim.models.local import mean_gradient_factor
from fedsim.privacy.composition import correlated
from fedsim.privacy.numerics.special import Array
from fedsim.training.client import Client
from fedsim.training.workload import Workload
from fedsim.types import Relation, Tensors, Unit, Update

_PILOT = 32
"""Trials without the canary in which entries are compared."""
_COMPARED = 1024
"""Most entries that are compared with each other."""
_ROUNDS = 20
"""Most rounds that are looked at apart."""
_RIDGE = 1e-9
"""Least noise variance of a feature, as a share of the mean variance."""
_PER_FEATURE = 4
"""Trials for each feature that their covariance is measured from; with fewer, variances alone."""
_GAIN = 1.2
"""Factor in standard deviations by which another look must beat the sum to be taken for it."""
_ERROR = 0.05
"""Probability with which a comparison of looks may err."""


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """The trainings of a canary's client, as functions of world and trial."""

    run: Callable[[int, int], list[Tensors]]
    """Function (world, trial) -> the update seen in each round, with randomness of the trial's own.
    World 1 has the canary, any other world does not."""
    towards: Sequence[Tensors]  # contribution of the canary to each round
    weights: Array  # (rounds,) weight of each round where all noise is as declared


class _Looks:
    """Features of a trial: sums along the canary, by tensor and round, and a few entries."""

    def __init__(self, trials: _Trials) -> None:
        towards = trials.towards
        self._towards, self._weights = towards, trials.weights
        flat = _flat(towards[0])
        ends = np.cumsum([value.numel() for value in towards[0].values()])
        each = max(1, _COMPARED // len(ends))
        some = np.concatenate(
            [
                np.arange(max(0, end - size), end)[:each]
                for end, size in zip(ends, np.diff(ends, prepend=0), strict=True)
            ]
        )
        total, squares = np.zeros_like(flat), np.zeros_like(flat)
        compared = []
        # World 2 is without the canary, and its randomness is of no trial that is counted.
        for trial in range(_PILOT):
            seen = _flat(trials.run(2, trial)[0])
            total += seen
            squares += seen**2
            compared.append(seen[some])
        variance = np.maximum(squares / _PILOT - (total / _PILOT) ** 2, 0.0)
        # Entries without noise would divide by 0.
        floor = _RIDGE * variance.mean() + np.finfo(float).tiny
        self._entry = int(np.argmax(flat**2 / (variance + floor)))
        with np.errstate(invalid="ignore", divide="ignore"):
            alike = np.atleast_2d(np.nan_to_num(np.corrcoef(np.array(compared), rowvar=False)))
        signal = flat[some] / np.sqrt(variance[some] + floor)
        # Where the noise of two entries is correlated, their difference (or sum) cancels it: these
        # are the squared signal-to-noise ratios of all pairs.
        left = signal[:, None] - np.sign(alike) * signal
        told = left**2 / (2 * (1 - np.abs(alike)) + _RIDGE)
        np.fill_diagonal(told, 0.0)
        self._pair = some[list(np.unravel_index(int(told.argmax()), told.shape))]

    def features(self, seen: Sequence[Tensors]) -> Array:
        """Computes the (F,) features of a trial from what is `seen` of each round."""
        # The first is the sum along the canary over all rounds, weighted. The next are the entry of
        # the first round that shows it best, and a difference of the last two rounds. Then come
        # sums by tensor and by round, sums of a round along the canary of the round before, and two
        # entries.
        own = np.array(
            [
                [along({name: one[name]}, {name: toward[name]}) for name in toward]
                for one, toward in zip(seen, self._towards, strict=True)
            ]
        )
        first = _flat(seen[0])
        last = range(max(0, len(seen) - _ROUNDS), len(seen) - 1)
        # A round's sum along the round before: noise that comes again shows up there.
        crossed = [along(seen[t + 1], self._towards[t]) for t in last]
        by_round = own.sum(1)
        # Equal noise in the last two rounds cancels in this difference, and the canary does not.
        apart = by_round[-2] - crossed[-1] if crossed else 0.0
        by_tensor = self._weights @ own
        return np.array(
            [
                float(by_tensor.sum()),
                first[self._entry],
                apart,
                *by_tensor,
                *by_round[-_ROUNDS:],
                *crossed,
                *first[self._pair],
            ]
        )


def _choose_look(absent: Array, present: Array) -> tuple[Array, Array]:
    """Returns scores (n,) and (m,) of trials' features, by the look that shows the canary best."""
    # A look is a weighted sum of features (n, F) and (m, F), the larger the likelier with the
    # canary. It is chosen on the first half of each world's trials, so that a bound may count the
    # second halves alone. Of too few trials it is the first feature.
    halves = absent[: len(absent) // 2], present[: len(present) // 2]
    if min(map(len, halves)) < LEAST_DRAWS:
        return absent[:, 0], present[:, 0]
    count = absent.shape[1]
    singles = np.eye(count)[:3]
    looks = [*singles, -singles[1], -singles[2], _discriminant(*halves)]
    # `mu_bound` counts the second half of each: trials that the discriminant was not fitted to.
    told = [mu_bound(*(half @ look for half in halves), error=_ERROR) for look in looks]
    best = int(np.argmax(told))
    look = looks[best if told[best] > _GAIN * told[0] else 0]
    return absent @ look, present @ look


def _discriminant(absent: Array, present: Array) -> Array:
    """Returns (F,) Fisher's linear discriminant of the first halves of what is given."""
    some = [half[: len(half) // 2] for half in (absent, present)]
    shift = some[1].mean(0) - some[0].mean(0)
    scale = np.sqrt(np.mean([half.var(0) for half in some], axis=0))
    scale = np.maximum(scale, _RIDGE * (np.abs(shift) + scale.mean()) + np.finfo(float).tiny)
    spread = np.mean([np.cov(half / scale, rowvar=False) for half in some], axis=0)
    if _PER_FEATURE * len(shift) > min(map(len, some)):
        # Of too few trials a covariance is nearly singular, and its inverse is noise.
        spread = np.diag(np.diag(spread))
    found: Array = np.linalg.solve(spread + _RIDGE * np.eye(len(shift)), shift / scale) / scale
    found /= np.abs(found).max()
    return found


def _flat(tensors: Tensors) -> Array:
    found: Array = torch.cat([value.flatten().double() for value in tensors.values()]).numpy()
    return found


def scores(
    workload: Workload,
    unit: Unit,
    relation: Relation,
    taken: Collection[tuple[int, ...]],
    canaries: int,
    on_progress: Callable[[int, int], None],
) -> tuple[Array, Array]:
    """Trains one client many times; returns its scores without the canary and with it.

    Both are (`canaries`,) float64, the arguments of `bounds.threshold_bound`. It fails as
    `Client.update`.

    Args:
        workload: the federation.
        unit: what the claim hides, a `client` or an `example`.
        relation: of an example, `replace_one` if one like the client's others is in its place
            where it is absent; otherwise none is.
        taken: for each client the numbers of the rounds that it takes part in, from 1. A canary
            takes part as the client that is the worst off.
        canaries: number of trainings in each world.
        on_progress: called with (trainings done, all).
    """
    trials = (
        _client_trials(workload, taken)
        if unit == "client"
        else _example_trials(workload, relation, max(map(len, taken)))
    )
    looks = _Looks(trials)

    def draw(present: bool) -> Array:
        found = []
        for trial in range(canaries):
            found.append(looks.features(trials.run(int(present), trial)))
            on_progress(int(present) * canaries + trial + 1, 2 * canaries)
        return np.array(found)

    return _choose_look(draw(False), draw(True))


def _client_trials(workload: Workload, taken: Collection[tuple[int, ...]]) -> _Trials:
    """Returns trials of a client that sends updates of twice the bound, or noise alone."""
    stack, declared = workload.stack, workload.declared
    seed = workload.scenario.seed
    rounds, weights = _worst_participation(workload, taken)
    contributions = Contributions(workload)
    # Where noise is declared independent between rounds, each has a direction of its own: noise
    # that comes again is then told from the canary.
    turns = not isinstance(stack.aggregation, NoisyAggregation)
    towards = [
        contributions.client_update(*([round] if turns and round > 1 else []))
        for round in range(1, len(weights) + 1)
    ]
    away = {name: torch.zeros_like(value) for name, value in towards[0].items()}

    def run(world: int, trial: int) -> list[Tensors]:
        server = rng.derive(seed, "canary", world, trial)
        state = stack.init(away, declared)
        seen = []
        for round, toward in enumerate(towards, 1):
            # A client that does not take part sends nothing, while the server's noise goes on.
            released: Tensors = away
            if round in rounds:
                noise = rng.generator(seed, "canary", world, trial, round)
                released, state = stack.apply(toward if world == 1 else away, state, noise)
            seen.append(_server_view(workload, released, round, server))
        return seen

    return _Trials(run=run, towards=towards, weights=weights)


def _worst_participation(
    workload: Workload, taken: Collection[tuple[int, ...]]
) -> tuple[frozenset[int], Array]:
    """Returns (rounds, weights) of the client that is easiest to detect."""
    if not isinstance(workload.stack.aggregation, NoisyAggregation):
        most = max(map(len, taken))
        return frozenset(range(1, most + 1)), np.ones(most)
    mechanism = workload.stack.guarantees(workload.declared)[-1].mechanism
    correlation = getattr(mechanism, "correlation", 0.0)
    # With noise C^-1 Z, <C z, C y> is the matched filter for participation z in what is seen, y.
    ordered, past = sorted(taken), range(1, workload.scenario.training.rounds + 1)
    present = np.array([[round in each for round in past] for each in ordered])
    moved = correlated.accumulate(present, correlation)  # C z of each
    farthest = int(np.linalg.norm(moved, axis=1).argmax())
    weights = correlated.accumulate(moved[farthest, None, ::-1], correlation)[0, ::-1]  # C'C z
    return frozenset(ordered[farthest]), weights


def _example_trials(workload: Workload, relation: Relation, rounds: int) -> _Trials:
    """Returns trials of a client, with the least data, of whose examples one matters."""
    # Sampling hides the examples of the client with the least data least.
    client = min(workload.clients, key=lambda one: len(one.own))
    base = _choose_base_image(workload, client)
    absent = _make_world(workload, relation, client, base, None)

    def shift(canary: _World, start: tuple[Tensors, Tensors]) -> Tensors:
        moved, without = _sum_contributions(canary, start), _sum_contributions(absent, start)
        return {name: value - without[name] for name, value in moved.items()}

    start = workload.initial()
    tried = [_make_world(workload, relation, client, base, how) for how in _CANARIES]
    shifts = [(canary, shift(canary, start)) for canary in tried]
    there, toward = shifts[0]
    farthest = max(shifts, key=lambda pair: float(global_norm(pair[1])))
    # More than one example moves by itself: others'
    # contributions moved with it, and the worst is taken.
    if float(global_norm(farthest[1])) > _MOST_OF_ONE:
        there, toward = farthest
    starts, towards = [start] * rounds, [toward] * rounds
    if rounds > 1:
        # Negated weights are another model, at which the canary contributes something else.
        turned = {name: -value for name, value in start[0].items()}, start[1]
        elsewhere = shift(there, turned)
        # At negated weights a network may overflow; then every round stays at the start.
        if all_finite(elsewhere):
            starts[-1], towards[-1] = turned, elsewhere
    sign = mean_gradient_factor(workload.training)

    def run(world: int, trial: int) -> list[Tensors]:
        canary = there if world == 1 else absent
        seed = rng.derive(workload.scenario.seed, "canary", world, trial)
        # Trials differ by their noise and batches alone.
        one = replace(canary.client, seed=seed)
        state: Tensors = {}
        seen: list[Tensors] = []
        for round, at in enumerate(starts, 1):
            result = one.update(canary.federation, round, *at, state)
            state = result.state
            released = _server_view(canary.federation, result.update.tensors, round, seed)
            seen.append({name: sign * value for name, value in released.items()})
        return seen

    return _Trials(run=run, towards=towards, weights=np.ones(rounds))


def _full(image: Tensor) -> Tensor:
    """Returns an image like `image` with all entries at the largest value: 1.0, or 255 as bytes."""
    return torch.full_like(image, 1 if image.is_floating_point() else 255)


_CANARIES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda image: image,
    lambda image: _full(image) - image,
    torch.zeros_like,
    _full,
)
"""Ways to turn an image into a canary, beside giving it another label. The first leaves the image
as it is; the auditor takes it unless another one also moves what others contribute."""
_MOST_OF_ONE = 2 + 1e-3
"""Norm that one example moves by itself: a contribution of norm 1 is exchanged for another."""


@dataclass(frozen=True, kw_only=True)
class _World:
    federation: Workload
    client: Client
    """The canary's client, or the holder of the rest of its data where there is no canary."""


def _choose_base_image(workload: Workload, client: Client) -> int:
    """Returns the client's image whose contribution differs most between two labels."""
    data, contributions = images(workload), Contributions(workload)

    def apart(index: int) -> float:
        image, label = data.train_images[[index]], data.train_labels[index]
        here = contributions.unit_gradient(image, label)
        there = contributions.unit_gradient(image, other_label(data, label))
        return float(global_norm({name: here[name] - there[name] for name in here}))

    tried: list[int] = client.own[:_TRIED].tolist()
    return max(tried, key=apart)


_TRIED = 8
"""Most images of a client that are compared as canaries."""


def _make_world(
    workload: Workload,
    relation: Relation,
    client: Client,
    base: int,
    canary: Callable[[Tensor], Tensor] | None,
) -> _World:
    """Returns the federation on data with the canary, or on neighbouring data without it (None)."""
    # All images of the client are the one at `base`, and the first is the canary. In its place
    # there is then an image like all others (`replace_one`), or none is computed with (`zero_out`).
    data, part = images(workload), client.own
    image, label = data.train_images[base], data.train_labels[base]
    pixels, labels = data.train_images.clone(), data.train_labels.clone()
    pixels[part], labels[part] = image, label
    if canary:
        pixels[part[0]], labels[part[0]] = canary(image), other_label(data, label)
    federation = workload.of_neighbours(replace(data, train_images=pixels, train_labels=labels))
    own = federation.clients[client.number]
    if relation == "zero_out":
        own = replace(own, absent=part[1:] if canary else part)
    return _World(federation=federation, client=own)


def _sum_contributions(world: _World, start: tuple[Tensors, Tensors]) -> Tensors:
    """Returns the sum of the client's contributions at that model, each at a norm of 1."""
    data, part = images(world.federation), world.client.own
    contributions = Contributions(world.federation, start)
    total = {name: torch.zeros_like(value) for name, value in contributions.start[0].items()}
    rest = part[1:]
    for members in (part[:1], rest):
        there = world.client.there(members)
        if len(there):
            one = there[0]  # all others of the client are alike
            found = contributions.unit_gradient(
                data.train_images[one][None], data.train_labels[one]
            )
            for name, value in found.items():
                total[name] += len(there) * value
    return total


def _server_view(workload: Workload, released: Tensors, round: int, seed: int) -> Tensors:
    """Returns what a server with noise of `seed` sees, if it knows what all others sent."""
    if workload.stack.aggregation is None:
        return released
    return workload.combine_updates(
        [Update(tensors=released, num_examples=1)], round, seed=seed
    ).tensors
