"""Draws which of a client's examples a batch holds, under each `LocalTraining.sampling`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim import rng as streams
from fedsim.types import FedsimError
from fedsim.words import number_of


def without_replacement(
    indices: Tensor, batch_size: int, rng: torch.Generator, place: int = 0
) -> Tensor:
    """Draws an order of a client's examples and returns a batch, one slice of it.

    Args:
        indices: (n,), the client's examples.
        batch_size: Number of examples of a batch; a FedsimError if it is above n.
        rng: The same seed draws the same order.
        place: Number of the slice, from 0 to n // `batch_size` - 1.
    """
    if batch_size > len(indices):
        raise FedsimError(
            f"a batch of {number_of(batch_size, 'image')} was asked of a client that has "
            f"{len(indices)}: lower "
            "the batch size, lower data.clients, or choose a more even partition"
        )
    order = torch.randperm(len(indices), generator=rng)
    return indices[order[place * batch_size : (place + 1) * batch_size]]


def poisson(indices: Tensor, batch_size: int, rng: torch.Generator) -> Tensor:
    """Draws each of `indices` (n,), n > 0, by itself at rate `batch_size` / n: perhaps none."""
    # A float32 draw is a multiple of 2^-24: it would round the rate that the accountant takes.
    drawn = torch.rand(len(indices), generator=rng, dtype=torch.float64)
    return indices[drawn < batch_size / len(indices)]


def balls_in_bins(indices: Tensor, bins: int, step: int, rng: torch.Generator) -> Tensor:
    """Deals `indices` at random to `bins`, and returns those of bin `step` % `bins`: perhaps none.

    Args:
        indices: (n,), the client's examples.
        bins: Number of bins among which the examples are dealt.
        step: Number of the client's step, counted from 0 over all rounds.
        rng: A generator with the same seed in each step, so that the deal stays.
    """
    # The bins are the same in each step: an example takes part once in any `bins` successive ones.
    return indices[torch.randint(bins, (len(indices),), generator=rng) == step % bins]


def of_trial(
    indices: Tensor, batch_size: int, trial: int, trials: int, step: int, rng: torch.Generator
) -> Tensor | None:
    """Returns `batch_size` of `indices` for one step of a trial; None if too few are left.

    No other trial and no other step draws the same examples. Those of a trial's first step depend
    neither on the number of trials nor on that of steps.

    Args:
        indices: (n,), the client's examples, all different.
        batch_size: Number of examples of a step.
        trial: Number of the trial, from 0.
        trials: How many trials there are.
        step: Number of the step within the trial, from 0.
        rng: A generator with the same seed in each trial and step, so that the order stays.
    """
    # Steps are the outer order: step 0 starts at trial * batch_size, whatever `trials` is.
    start = (step * trials + trial) * batch_size
    if start + batch_size > len(indices):
        return None
    order = torch.randperm(len(indices), generator=rng)
    return indices[order[start : start + batch_size]]


def distinct(indices: Tensor, images: Tensor) -> Tensor:
    """Returns `indices` (n,) in order, less those whose image in `images` (CPU) came before."""
    first: dict[int, int] = {}
    for index in indices.tolist():
        # A digest stands for the image, so that memory does not grow with the pixels.
        content = images[index].contiguous().numpy().tobytes()
        first.setdefault(streams.of_bytes(content), index)
    return torch.tensor(list(first.values()), dtype=torch.int64)
