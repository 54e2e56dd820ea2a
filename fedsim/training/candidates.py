"""Sets examples of clients aside by coins, so that attacks can be asked who took part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim import rng
from fedsim.types import FedsimError
from fedsim.words import number_of


@dataclass(frozen=True, kw_only=True)
class CandidateSplit:
    """Says which examples of a client are candidates, and which of these it trains on."""

    examples: Tensor
    """(N,) indices of the candidates among the training examples, ascending."""
    members: Tensor
    """(N,) bool: whether the client trains on each candidate, by a fair coin of its own."""

    @property
    def held_out(self) -> Tensor:
        """Indices among the training examples of candidates that the client does not train on."""
        return self.examples[~self.members]


def split_candidates(
    parts: Sequence[Tensor], inputs: Tensor, count: int, seed: int, *, least: int = 1
) -> list[CandidateSplit]:
    """Draws `count` candidates of each client, and tosses the coin of each.

    The result has an entry for each client, in the order of `parts`.

    Candidates and others of a client are drawn alike, so that nothing but the coin tells members
    from others. An example whose content occurs twice among all training examples is no candidate:
    its copy could be trained on while it is held out.

    Args:
        parts: Indices of each client's examples.
        inputs: (n, ...) all training inputs, on the CPU.
        count: Number of candidates of a client.
        seed: Seed of the draws and coins.
        least: Least number of examples that a client has to keep.

    Raises:
        FedsimError: a client has too few examples without a copy, or would keep too few.
    """
    # Compared by content, since a copy has an index of its own.
    digests = [rng.of_bytes(each.contiguous().numpy().tobytes()) for each in inputs]
    times = Counter(digests)
    single = torch.tensor([times[digest] == 1 for digest in digests])
    splits = []
    for client, own in enumerate(parts):
        fit = own[single[own]]
        if len(fit) < count:
            raise FedsimError(
                f"observe.candidates: client {client} holds {number_of(len(fit), 'example')} "
                f"without a copy, and {count} candidates were asked for; ask for fewer, lower "
                "data.clients or use a larger source"
            )
        # A stream of its own: a client's coins do not depend on how many clients there are.
        stream = rng.generator(seed, "candidates", client)
        drawn = fit[torch.randperm(len(fit), generator=stream)[:count]].sort().values
        members = torch.rand(count, generator=stream) < 0.5
        split = CandidateSplit(examples=drawn, members=members)
        if len(own) - len(split.held_out) < least:
            raise FedsimError(
                f"observe.candidates: without the candidates that its coins hold out, client "
                f"{client} keeps {len(own) - len(split.held_out)} examples, fewer than the {least} "
                "of a batch; ask for fewer candidates or use smaller batches"
            )
        splits.append(split)
    return splits
