"""Laws of `chain`: identity, written order, composition, and what a stack proves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.contracts.stack import Stack, chain
from fedsim.testing.cases import mixed_update, non_finite, same, stream
from fedsim.types import FedsimError, LocalTraining, Tensors
from fedsim_defenses.aggregate import Aggregate
from fedsim_defenses.clip import Clip
from fedsim_defenses.dropout import Dropout
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.gradient_pruning import GradientPruning
from fedsim_defenses.local_aggregation import LocalAggregation
from fedsim_defenses.quantization import Quantization
from fedsim_defenses.top_k import TopK

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)


def run(stack: Stack, update: Tensors, seed: int = 1) -> Tensors:
    return stack.apply(update, stack.init(update, DECLARED), stream(seed))[0]


@pytest.mark.parametrize(
    "update", [mixed_update(), non_finite(math.nan), non_finite(-math.inf), {}]
)
def test_the_empty_chain_is_the_identity_bit_for_bit(update: dict[str, Tensor]) -> None:
    negative_zero = {**update, "negative zero": torch.full((64,), -0.0)}
    assert same(run(chain(), negative_zero), negative_zero)


@pytest.mark.parametrize(
    "neutral",
    [
        GaussianNoise(std=0.0),
        Clip(norm=1e12),
        GradientPruning(ratio=0.0),
        GradientPruning(ratio=0.0, scope="tensor"),
    ],
)
def test_a_defense_of_strength_zero_is_the_identity_bit_for_bit(neutral: object) -> None:
    update = {**mixed_update(), "negative zero": torch.full((64,), -0.0)}
    assert same(run(chain(neutral), update), update)  # type: ignore[arg-type]


def test_the_chain_is_the_composition_of_its_members() -> None:
    update = mixed_update()
    members = (Clip(norm=0.5), GaussianNoise(std=0.1), Quantization(bits=6), TopK(ratio=0.3))
    rng, expected = stream(), update
    for member in members:
        expected, _ = member.apply(expected, member.init(expected, 0.5), rng)
    assert same(run(chain(*members), update), expected)


def test_each_member_keeps_its_own_state_over_rounds() -> None:
    update = {"a": torch.tensor([1.0, 2.0, 4.0])}
    stack = chain(TopK(ratio=0.3), Clip(norm=100.0), TopK(ratio=0.6))
    state = stack.init(update, DECLARED)
    assert sorted(state) == ["0.a", "2.a"]
    first, state = stack.apply(update, state, stream())
    second, state = stack.apply(update, state, stream())
    assert first["a"].tolist() == [0.0, 0.0, 4.0]
    assert state["0.a"].tolist() == [2.0, 0.0, 4.0]
    assert second["a"].tolist() == [0.0, 4.0, 0.0]


def test_training_defenses_come_first_wherever_they_are_written() -> None:
    stack = chain(Clip(norm=1.0), LocalAggregation(steps=5), Dropout(rate=0.25))
    training = stack.training(DECLARED)
    assert (training.algorithm, training.steps, training.dropout) == ("fedavg", 5, 0.25)
    assert [type(defense) for defense in stack.update_defenses] == [Clip]


def test_an_aggregation_that_is_not_last_is_refused() -> None:
    with pytest.raises(FedsimError, match="last"):
        chain(Aggregate(), Clip(norm=1.0))
    assert chain(Clip(norm=1.0), Aggregate()).vantage == "aggregate"
    assert chain(Clip(norm=1.0)).vantage == "server"


@pytest.mark.parametrize(
    ("stack", "sensitivity"),
    [
        (chain(), math.inf),
        (chain(Clip(norm=2.0)), 2.0),
        (chain(Clip(norm=2.0), Clip(norm=5.0)), 2.0),
        (chain(Clip(norm=2.0), GradientPruning(ratio=0.5), Aggregate()), 2.0),
        (chain(Clip(norm=2.0), Quantization(bits=4)), math.inf),
        (chain(Clip(norm=2.0), TopK(ratio=0.5)), math.inf),
        (chain(Clip(norm=2.0), GaussianNoise(std=1.0)), math.inf),
        (chain(Clip(norm=2.0), GaussianNoise(std=1.0), Clip(norm=3.0)), 3.0),
        (chain(Clip(norm=2.0), GaussianNoise(std=1.0), Clip(norm=3.0), TopK(ratio=0.1)), math.inf),
    ],
)
def test_what_bound_a_stack_proves(stack: Stack, sensitivity: float) -> None:
    assert stack.guarantees(DECLARED)[-1].sensitivity == sensitivity
