"""Which of a client's examples a batch holds, under each `LocalTraining.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.types import FedsimError


def without_replacement(indices: Tensor, batch_size: int, rng: torch.Generator) -> Tensor:
    """`batch_size` of `indices`, drawn uniformly without replacement.

    Raises:
        FedsimError: there are fewer.
    """
    if batch_size > len(indices):
        raise FedsimError(
            f"a batch of {batch_size} images was asked of a client that has {len(indices)}: lower "
            "the batch size, lower data.clients, or choose a more even partition"
        )
    return indices[torch.randperm(len(indices), generator=rng)[:batch_size]]


def poisson(indices: Tensor, batch_size: int, rng: torch.Generator) -> Tensor:
    """Each of `indices` with probability `batch_size` / their number, independently; maybe none."""
    drawn = torch.rand(len(indices), generator=rng, dtype=torch.float64)
    return indices[drawn < batch_size / len(indices)]


def balls_in_bins(indices: Tensor, bins: int, step: int, rng: torch.Generator) -> Tensor:
    """Those of `indices` whose bin has its turn in `step` (from 0); maybe none.

    `rng` assigns the bins: a fresh one of the same seed in each step, so that they stay.
    """
    return indices[torch.randint(bins, (len(indices),), generator=rng) == step % bins]
