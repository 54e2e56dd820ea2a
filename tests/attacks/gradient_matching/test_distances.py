"""Distances of updates, of whatever size: a cosine is one also where squares underflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.rng import generator
from fedsim_attacks.gradient_matching._matching import (
    Distance,
    MatchedUpdate,
    cosine_distance,
    reweighted_cosine,
)


def drawn(seed: int, *sizes: float) -> list[Tensor]:
    """Tensors whose entries have these sizes."""
    stream = generator(seed, "distances")
    return [size * torch.randn(4, 5, generator=stream) for size in sizes]


def target_of(tensors: list[Tensor]) -> MatchedUpdate:
    square = torch.stack([t.square().sum() for t in tensors]).sum()
    return MatchedUpdate(tensors, square, torch.zeros(()))


@pytest.mark.parametrize("distance", [cosine_distance, reweighted_cosine([1.0, 2.0])])
@pytest.mark.parametrize("wanted", [1.0, 1e-6, 1e-15])
@pytest.mark.parametrize("size", [1e8, 1.0, 1e-12, 1e-17, 1e-20, 1e-25, 0.0])
def test_a_distance_of_directions_is_between_0_and_2(
    distance: Distance, wanted: float, size: float
) -> None:
    target = target_of(drawn(1, wanted, wanted))
    for update in (drawn(2, size, size), [size / wanted * t for t in target.tensors]):
        loss, direction, scale = distance(update, target)
        assert -1e-5 <= float(loss) <= 2 + 1e-5
        assert bool(scale.isfinite()) and all(bool(each.isfinite().all()) for each in direction)


@pytest.mark.parametrize("distance", [cosine_distance, reweighted_cosine([1.0, 2.0])])
def test_a_direction_is_the_same_at_every_size(distance: Distance) -> None:
    target = target_of(drawn(1, 1e-6, 1e-6))
    usual = float(distance(drawn(2, 1.0, 1.0), target)[0])
    for size in (1e6, 1e-8, 1e-14, 1e-16):
        assert float(distance(drawn(2, size, size), target)[0]) == pytest.approx(usual, rel=1e-4)


def test_where_all_that_counts_is_zero_entries_weigh_alike() -> None:
    """As of a classifier that starts at zero, before which nothing has a gradient."""
    target, update = target_of(drawn(1, 1.0, 0.0)), drawn(2, 1.0, 1.0)
    found = reweighted_cosine([0.0, 3.0])(update, target)
    alone = cosine_distance(update[:1], target_of(target.tensors[:1]))
    assert float(found[0]) == pytest.approx(float(alone[0]), rel=1e-5)
    assert all(bool(each.isfinite().all()) for each in found[1])
