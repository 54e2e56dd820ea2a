"""Rule 19: no ε that is stated is less than what is true of what a client releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

from fedsim import rng
from fedsim.contracts.defense import ServerRound
from fedsim.contracts.stack import chain
from fedsim.federation import refusals
from fedsim.learners import sgd
from fedsim.learners.closed_form import VALUE, regularize, sketch
from fedsim.learners.least_squares import normal_solution
from fedsim.privacy.ledger import Entry, claim
from fedsim.results import rows
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, LocalTraining, Table, Tensors, Update
from fedsim.words import format_bound, format_claim, format_delta, format_epsilon
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_ftrl import DPFTRL
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.per_example import clipped_mean

COLUMNS = 12
RELEASES: dict[str, tuple[dict[str, Any], str]] = {
    "sketch": ({"name": "sketch", "columns": COLUMNS}, "random_projection"),
    "coefficients": (
        {"name": "least_squares", "method": "ls", "columns": COLUMNS},
        "least_squares",
    ),
}


def of_rows(kind: str, seed: int) -> Workload:
    """One client with some rows, whose release is private at ε = 1."""
    learner, defense = RELEASES[kind]
    noise = {"name": defense, "epsilon": 1.0, "delta": 1e-3}
    document = {
        "name": "rows",
        "seed": seed,
        "data": {"source": {"name": "synthetic_table", "rows": 30, "features": 3}, "clients": 1},
        "learner": learner,
        "training": {"rounds": 1},
        "defenses": {"dp": [noise]},
        "attacks": [],
    }
    return Workload(resolve(document), "dp")


@pytest.mark.parametrize("kind", RELEASES)
def test_no_32_bits_give_the_noise_of_a_release(kind: str) -> None:
    """Who knows all other rows tries 2^32 seeds, and one of them explains the release exactly.

    PyTorch's generators take 32 bits of a seed. A release then has 2^32 values, others with a row
    than without it: δ is 1, and no ε holds.
    """
    seed = 987654321
    world = of_rows(kind, seed)
    data = world.dataset
    assert isinstance(data, Table)
    assert world.release is not None
    whole_rows = regularize(data.train_rows, world.stack.sigma(world.release))
    draw = sketch if kind == "sketch" else normal_solution
    released = world.client_update(0, 1, *world.initial(), {}).update.tensors[VALUE]

    few = rng.derive(seed, "learner", 1, 0) % 2**32
    guessed = draw(whole_rows, COLUMNS, torch.Generator().manual_seed(few))
    assert not torch.allclose(guessed, released)

    whole = draw(whole_rows, COLUMNS, rng.generator(seed, "learner", 1, 0))
    assert torch.equal(whole, released), "it is the cipher's, under a key of the release's own"


@pytest.mark.parametrize("value", [1.004, 4.6549, 0.012341, 123.49, 1234.0, 9.9949, 3e-7, 1e19])
def test_no_figure_is_written_rounded_in_its_own_favour(value: float) -> None:
    """An ε or δ is stated up, what an audit shows of it down, by a digit of three (of six)."""
    told, bound = float(format_epsilon(value)), float(format_bound(value))
    assert bound <= value <= told
    assert told / bound < 1.02
    assert value <= float(format_delta(value)) < value * (1 + 1e-5)
    words = format_claim(value, 1.234562e-5, "example", "replace_one")
    assert words == f"{format_epsilon(value)} (1.23457e-05, example, replace one)"


@pytest.mark.parametrize(("value", "told"), [(1.0000000004, "1"), (0.0, "0"), (2.5, "2.5")])
def test_what_a_search_for_noise_leaves_is_no_digit(value: float, told: str) -> None:
    assert format_epsilon(value) == format_bound(value) == told


def directions(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    """A loss of which an example's gradient is the example itself."""
    return (parameters["w"] * images.flatten(1)).sum() / len(labels)


def mean_of(examples: Tensor, norm: float) -> Tensor:
    start = {"w": torch.zeros(examples.shape[1])}
    labels = torch.zeros(len(examples), dtype=torch.int64)
    images = examples[:, None, None, :]
    return clipped_mean(directions, start, images, labels, norm, len(examples))["w"]


@pytest.mark.parametrize("entries", [10, 256, 4096])
def test_no_clipped_gradient_is_longer_than_the_bound(entries: int) -> None:
    """Also where its norm, as rounded, is the bound itself."""
    drawn = torch.randn(40, entries, generator=torch.Generator().manual_seed(0))
    for example in drawn:
        near = float(example.norm())
        for norm in (near * (1 - 1e-7), near, near * (1 + 1e-7)):
            assert float(mean_of(example[None], norm).double().norm()) <= norm


def test_one_of_many_examples_moves_their_mean_by_no_more_than_accounted() -> None:
    """A mean in float32 has an error that is not small beside one example of 20,000."""
    examples = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    here = mean_of(examples, 1.0).double()
    for index in range(0, len(examples), 4999):
        other = examples.clone()
        other[index] *= -1
        moved = float((mean_of(other, 1.0).double() - here).norm())
        assert moved * len(examples) <= 2


def test_one_of_many_clients_moves_their_sum_by_no_more_than_the_noise_is_for() -> None:
    """A running mean in float32 errs by more than one client of 4,000 may move it."""
    draws = torch.Generator().manual_seed(0)
    bounded = torch.nn.functional.normalize(torch.rand(4000, 3, generator=draws), dim=1)
    server = DPFTRL(noise_multiplier=1.0)

    def total(without: int | None) -> Tensor:
        updates = (
            Update(tensors={"w": torch.zeros(3) if i == without else one}, num_examples=1)
            for i, one in enumerate(bounded)
        )
        return server.combine(updates).tensors["w"].double()

    here = total(None)
    longest = float(bounded.double().norm(dim=1).max())
    moved = max(float((total(i) - here).norm()) for i in range(0, 4000, 800))

    def noise(clients: int) -> Tensor:
        zero = Update(tensors={"w": torch.zeros(3)}, num_examples=1)
        asked = ServerRound(clients=clients, sensitivity=1.0, stream=rng.generator(5), before=None)
        return server.add_noise(zero, asked).tensors["w"].double() * clients

    widened = float((noise(4000) / noise(1)).mean())
    assert moved <= longest * widened
    assert moved <= longest * (1 + 2.0**-22 * 4000)
    assert 1 < widened < 1.01


@pytest.mark.parametrize("multiplier", [1e-8, 1e-20, 1e-60])
def test_noise_that_is_lost_in_rounding_proves_nothing(multiplier: float) -> None:
    """Added to 1 it gives 1: whoever sees the release reads the update."""
    stack = chain(Clip(norm=1.0), GaussianNoise(multiplier=multiplier))
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=0.1, mode="train")
    update = {"w": torch.ones(1)}
    state = stack.init(update, training)
    seen = {float(stack.apply(update, state, rng.generator(i))[0]["w"]) for i in range(200)}
    assert len(seen) <= 2
    found = claim(stack, training, Entry(rounds=1, num_examples=1, delta=1e-5))
    assert found.epsilon == float("inf")
    assert "too small" in str(found.reason)


def test_tensors_that_no_defense_acts_on_void_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner of a third party may release whole numbers, which pass by all defenses."""
    world = of_rows("sketch", 1)
    floats, buffers = world.initial()
    counted = {**floats, "count": torch.zeros(2, dtype=torch.int64)}
    monkeypatch.setattr(world.computation, "initial", lambda: (counted, buffers))
    found = rows.spent(world, 1)
    assert rows.spent(of_rows("sketch", 1), 1).epsilon < float("inf") == found.epsilon
    assert "count" in str(found.reason)


def test_a_learner_that_steps_around_the_stack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients leave the client bare, and the claim would be that of dp_sgd."""
    private = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 1.0}]
    document = tiny_scenario(data__clients=1, defenses={"dp": private})
    refusals.check(Workload(resolve(document), "dp"))
    train = sgd.train

    def bare(*arguments: Any) -> Any:
        *given, _, stream = arguments
        return train(*given, chain(), stream)

    monkeypatch.setattr(sgd, "train", bare)
    with pytest.raises(FedsimError, match=r"defenses\.dp: learner sgd took its steps without"):
        refusals.check(Workload(resolve(document), "dp"))
