"""Rule 19: no ε that is stated is less than what is true of what a client releases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsim import rng
from fedsim.learners.closed_form import VALUE, regularized, sketch
from fedsim.learners.least_squares import normal_solution
from fedsim.scenario.resolve import resolve
from fedsim.types import Table
from fedsim.workload import Workload

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
    rows = regularized(data.train_rows, world.stack.sigma(world.release))
    draw = sketch if kind == "sketch" else normal_solution
    released = world.client_update(0, 1, *world.initial(), {}).update.tensors[VALUE]

    few = rng.derive(seed, "learner", 1, 0) % 2**32
    guessed = draw(rows, COLUMNS, torch.Generator().manual_seed(few))
    assert not torch.allclose(guessed, released)

    whole = draw(rows, COLUMNS, rng.generator(seed, "learner", 1, 0))
    assert torch.equal(whole, released), "it is the cipher's, under a key of the release's own"
