"""Says how likely a guess is to come close, where the truth is one of the public images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CANDIDATES = 1024
"""Maximum number of public images that a prior is of."""


@dataclass(frozen=True, kw_only=True)
class GuessChances:
    """Bounds how likely a guess that saw no update reaches each level of a score.

    `candidates` is the number of public images that the truth may be.
    """

    levels: tuple[float, ...]
    """Values of the score, ascending, both ends of its range included."""
    chances: tuple[float, ...]
    """Upper bound on the probability of a single answer to reach each of `levels`, in their order.
    The truth is one of the candidates, each as likely."""
    candidates: int
    answers: int = 1
    """Number of answers of which the best counts."""


def bound_chances(
    distances: Tensor, radii: Sequence[float], groups: Tensor | None = None
) -> tuple[float, ...]:
    """Returns for each radius a bound on the chance that one answer is so near to the candidate.

    Bounds are upper ones, in the order of `radii`.
    The candidate is drawn uniformly. Candidates within r of one answer are within 2 r of each
    other. So no answer has more of them near than some candidate has within 2 r.

    Args:
        distances: (N, N) distances of a metric between candidates.
        radii: Radii in the same units.
        groups: (N,) what the attacker knows of the candidate, such as its label; its answer may
            differ by group. None: nothing.
    """
    count = len(distances)
    groups = torch.zeros(count, dtype=torch.int64) if groups is None else groups
    own = [distances[groups == group][:, groups == group] for group in sorted(set(groups.tolist()))]
    # A tolerance: at a radius of 0 a candidate is within it of itself, rounding or not.
    return tuple(
        sum(int((each <= 2 * radius + 1e-9).sum(1).max()) for each in own) / count
        for radius in radii
    )
