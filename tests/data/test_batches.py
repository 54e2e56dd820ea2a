"""How a client draws its batches: uniform, of one size or independent, a function of its stream."""

from __future__ import annotations

import math

import pytest
import torch

from fedsim.data.batches import balls_in_bins, poisson, without_replacement
from fedsim.types import FedsimError, LocalTraining

INDICES = torch.tensor([3, 5, 8, 13])


def stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_batch_is_drawn_uniformly_without_replacement() -> None:
    generator = stream(0)
    counts = dict.fromkeys(INDICES.tolist(), 0)
    for _ in range(2000):
        batch = without_replacement(INDICES, 2, generator).tolist()
        assert len(set(batch)) == 2
        for index in batch:
            counts[index] += 1
    # Binomial(2000, 1/2): four standard deviations are 90.
    assert all(abs(count - 1000) < 90 for count in counts.values())
    first = without_replacement(INDICES, 4, stream(1))
    assert sorted(first.tolist()) == INDICES.tolist()
    assert torch.equal(first, without_replacement(INDICES, 4, stream(1)))


def test_a_batch_beyond_the_clients_data_is_refused() -> None:
    with pytest.raises(FedsimError, match="batch of 3 images was asked of a client that has 2"):
        without_replacement(torch.tensor([0, 1]), 3, torch.Generator())


def test_poisson_includes_each_example_by_itself() -> None:
    """Marginals, pairs and sizes are those of independent coins."""
    generator, draws, rate = stream(0), 8000, 0.25
    drawn = torch.zeros(draws, 4)
    for row in drawn:
        row[torch.isin(INDICES, poisson(INDICES, 1, generator))] = 1
    bound = 5 * math.sqrt(rate * (1 - rate) / draws)
    assert (drawn.mean(0) - rate).abs().max() < bound
    together = drawn.T @ drawn / draws
    assert (together.fill_diagonal_(rate**2) - rate**2).abs().max() < bound
    empty = float((drawn.sum(1) == 0).double().mean())
    assert empty == pytest.approx((1 - rate) ** 4, abs=bound)


@pytest.mark.parametrize("bins", [1, 3, 7])
def test_an_epoch_of_bins_visits_each_example_once(bins: int) -> None:
    indices = torch.arange(50) * 3
    for epoch in range(3):
        bins_by_turn = [
            balls_in_bins(indices, bins, epoch * bins + t, stream(4)) for t in range(bins)
        ]
        assert torch.equal(torch.cat(bins_by_turn).sort().values, indices)
    again = balls_in_bins(indices, bins, 2 * bins, stream(4))
    assert torch.equal(again, balls_in_bins(indices, bins, 0, stream(4)))


def test_bins_are_uniform_and_independent() -> None:
    draws, bins = 6000, 3
    first = torch.zeros(draws, 4)
    for seed, row in enumerate(first):
        row[torch.isin(INDICES, balls_in_bins(INDICES, bins, 0, stream(seed)))] = 1
    bound = 5 * math.sqrt(1 / bins * (1 - 1 / bins) / draws)
    assert (first.mean(0) - 1 / bins).abs().max() < bound
    together = first.T @ first / draws
    assert (together.fill_diagonal_(1 / bins**2) - 1 / bins**2).abs().max() < bound


@pytest.mark.parametrize(
    ("examples", "size", "bins"), [(100, 10, 10), (95, 10, 10), (94, 10, 9), (4, 4, 1), (5, 4, 1)]
)
def test_bins_are_as_many_as_batches_of_that_size(examples: int, size: int, bins: int) -> None:
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=size, lr=0.1)
    assert training.bins(examples) == bins
