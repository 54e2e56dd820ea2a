"""Rule 16: no ε theatre. The claim is audited on the real defenses, and a false claim is caught.

The audit of Nasr et al. 2021 in its simplest form: an adversary who chooses the worst update sees
what a defense makes of it or of a zero update, and guesses by a threshold. The threshold is chosen
on one half of the trials; on the other, Clopper-Pearson intervals bound its error rates, and with
99% confidence ε is at least log((true positives - δ) / false positives).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense, global_norm
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import Stack, chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.testing.cases import local_step, stream
from fedsim.types import LocalTraining, Tensors, Update
from fedsim_defenses.aggregate import Aggregate
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.gaussian_noise import GaussianNoise

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)
DELTA = 1e-3
TRIALS = 3000


def claimed(stack: Stack, rounds: int = 1) -> float:
    return claim(stack, DECLARED, Entry(rounds=rounds, num_examples=4, delta=DELTA)).epsilon


def releases(stack: Stack, value: float, trials: int = TRIALS, rounds: int = 1) -> Tensor:
    """(trials,) sums over `rounds` of what `stack` makes of an update of one entry `value`."""
    update, rng = {"a": torch.tensor([value])}, stream(int(value) + 17)
    state = stack.init(update, DECLARED)
    scores = torch.zeros(trials)
    for trial in range(trials):
        for _ in range(rounds):
            defended, state = stack.apply(update, state, rng)
            scores[trial] += defended["a"][0]
    return scores


def audit(present: Tensor, absent: Tensor, confidence: float = 0.99) -> float:
    """The largest ε that the scores refute, from (trials,) scores of either world."""
    half = len(present) // 2

    def bound(threshold: float, chosen: slice) -> float:
        # each rate's interval may fail with half of the probability that the audit may
        hits = int((present[chosen] >= threshold).sum())
        alarms = int((absent[chosen] >= threshold).sum())
        count = len(present[chosen])
        tail = (1 - confidence) / 2
        least_hits = float(beta.ppf(tail, hits, count - hits + 1)) if hits else 0.0
        most_alarms = float(beta.ppf(1 - tail, alarms + 1, count - alarms)) if alarms < count else 1
        return math.log((least_hits - DELTA) / most_alarms) if least_hits > DELTA else 0.0

    grid = torch.quantile(torch.cat([present, absent])[: 2 * half], torch.linspace(0, 1, 200))
    best = max(grid.tolist(), key=lambda threshold: bound(threshold, slice(0, half)))
    return max(0.0, bound(best, slice(half, None)))


class TooLittleNoise(UpdateDefense):
    """Claims the noise of `gaussian_noise` and adds a quarter of it."""

    paper: ClassVar[str] = "none"
    multiplier: float

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return GaussianNoise(multiplier=self.multiplier / 4).init(update, sensitivity)

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return GaussianNoise(std=1.0).apply(update, state, rng)

    def guarantee(self, before: Guarantee) -> Guarantee:
        return GaussianNoise(multiplier=self.multiplier).guarantee(before)


class LooseClip(UpdateDefense):
    """Claims the bound of `clip` and clips to three times as much."""

    paper: ClassVar[str] = "none"
    norm: float

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return Clip(norm=3 * self.norm).apply(update, state, rng)

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.bounded(self.norm)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
def test_the_audited_bound_stays_under_the_claim(multiplier: float) -> None:
    stack = chain(Clip(norm=2.0), GaussianNoise(multiplier=multiplier))
    found = audit(releases(stack, 1e6), releases(stack, 0.0))
    assert 0.1 * claimed(stack) < found < claimed(stack)


@pytest.mark.slow
def test_composition_is_audited_over_rounds() -> None:
    stack = chain(Clip(norm=2.0), GaussianNoise(multiplier=3.0))
    present, absent = (releases(stack, v, TRIALS // 2, rounds=6) for v in (1e6, 0.0))
    found = audit(present, absent)
    assert found < claimed(stack, rounds=6)
    assert found > claimed(stack, rounds=1), "one round's ε must not pass for six rounds'"


@pytest.mark.parametrize(
    "false",
    [
        chain(Clip(norm=2.0), TooLittleNoise(multiplier=2.0)),
        chain(LooseClip(norm=2.0), GaussianNoise(multiplier=2.0)),
    ],
    ids=["noise too small", "clip too loose"],
)
def test_a_false_claim_is_caught(false: Stack) -> None:
    assert audit(releases(false, 1e6), releases(false, 0.0)) > claimed(false)


def test_unequal_weights_do_not_break_the_claim_at_the_aggregate() -> None:
    """The server sees a mean in which the audited client weighs 99%: no credit for the crowd."""
    stack = chain(Clip(norm=2.0), GaussianNoise(multiplier=1.0), Aggregate())
    trials = 2 * TRIALS  # the two claims between which the bound lies are near each other
    crowd = releases(stack, 1.0, trials)

    def seen(own: Tensor) -> Tensor:
        return torch.stack(
            [
                stack.aggregation.combine(  # type: ignore[union-attr]
                    [
                        Update(tensors={"a": a[None]}, num_examples=99),
                        Update(tensors={"a": b[None]}, num_examples=1),
                    ]
                ).tensors["a"][0]
                for a, b in zip(own, crowd, strict=True)
            ]
        )

    found = audit(seen(releases(stack, 1e6, trials)), seen(releases(stack, 0.0, trials)))
    single = chain(*stack.update_defenses)
    assert claimed(stack) == claimed(single)
    of_uniform_weights = chain(Clip(norm=2.0), GaussianNoise(multiplier=2.0))
    assert claimed(of_uniform_weights) < found < claimed(stack)


def test_replacing_an_example_moves_dp_sgd_by_twice_the_bound() -> None:
    """Were the claim made for a sensitivity of C / B, noise over distance would fall below it."""
    defense = DPSGD(norm=0.5, noise_multiplier=1.2)
    at = {"a": torch.zeros(20_000)}

    def loss(parameters: Tensors, images: Tensor, _: Tensor) -> Tensor:
        return (images.flatten(1) @ parameters["a"]).mean()

    images = torch.randn(4, 1, 100, 200, generator=stream())
    labels = torch.zeros(4, dtype=torch.int64)
    direction = defense.gradient(local_step(loss, lambda *_: {}, 4))
    here = direction(at, images, labels, stream())["a"]
    there = direction(at, torch.cat([-images[:1], images[1:]]), labels, stream())["a"]
    distance = float((here - there).norm())
    assert distance == pytest.approx(2 * 0.5 / 4, rel=1e-3)
    noise = float((direction(at, 0 * images, labels, stream())["a"]).std())
    assert noise / distance == pytest.approx(1.2 / 2, rel=0.02)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1.0, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e6])
def test_nothing_a_client_computes_gets_past_the_clip(scale: float, norm: float) -> None:
    update = {name: scale * t for name, t in _update().items()}
    clipped, _ = Clip(norm=norm).apply(update, {}, stream())
    assert float(global_norm(clipped)) <= norm


def test_a_large_epsilon_is_shown_and_not_hidden() -> None:
    weak = chain(Clip(norm=1.0), GaussianNoise(multiplier=0.01))
    assert 4000 < claimed(weak) < math.inf
    assert claimed(weak, rounds=10) > 9 * claimed(weak)


def _update() -> dict[str, Any]:
    draw = stream(3)
    return {"a": torch.randn(40, 3, generator=draw), "b": torch.randn((), generator=draw)}
