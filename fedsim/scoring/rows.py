"""Scores recovered rows of a table, and membership in it.

Entries are in [-1, 1], each column's declared range. A target is asked for by itself, so that rows
are compared in their order and never matched.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring.outcome import Unavailable

TOLERANCE = 0.05
"""A row is recovered if every entry is within this share of its column's range."""

FALSE_POSITIVES = 0.05
"""True positives are counted where at most this share of non-members is accused."""


def row_error(claimed: Tensor, truth: Tensor) -> Tensor | Unavailable:
    """Returns the squared distance of each pair (N, d) over the true squared length, (N,)."""
    length = truth.square().sum(1)
    if not bool(length.all()):
        return Unavailable("a true row is zero, so there is no relative error")
    return (claimed - truth).square().sum(1) / length


def row_cosine(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns the cosine of each pair of rows (N, d), (N,) in [-1, 1]; 0 if one is zero."""
    return F.cosine_similarity(claimed, truth, dim=1, eps=1e-30)


def recovered(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 where every entry of a row (N, d) is within `TOLERANCE`, else 0; (N,)."""
    return ((claimed - truth).abs().amax(1) <= 2 * TOLERANCE).double()


def right_class(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 where the largest class entry (N, classes) is the true one's, else 0; (N,)."""
    return (claimed.argmax(1) == truth.argmax(1)).double()


def membership_auc(scores: Tensor, members: Tensor) -> float | Unavailable:
    """Returns the probability that a member's score (N,) beats a non-member's; ties count half."""
    if _is_one_sided(members):
        return Unavailable("all candidates took part, or none did")
    inside, outside = scores[members].double(), scores[~members].double()
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside, side="left")
    level = torch.searchsorted(ordered, inside, side="right") - below
    return float((below.double() + 0.5 * level).mean() / len(outside))


def membership_tpr(
    scores: Tensor, members: Tensor, false_positives: float = FALSE_POSITIVES
) -> float | Unavailable:
    """Returns the share of members above the lowest threshold with few false positives.

    The false positive rate is that expected of a non-member outside the sample that sets the
    threshold: above the k-th highest of n scores lie k / (n + 1) of others.
    """
    if _is_one_sided(members):
        return Unavailable("all candidates took part, or none did")
    outside = scores[~members].double().sort(descending=True).values
    rank = math.floor(false_positives * (len(outside) + 1) + 1e-9)
    if rank == 0:
        needed = math.ceil(1 / false_positives - 1e-9) - 1
        return Unavailable(
            f"{len(outside)} candidates took no part; a rate of {false_positives:g} takes {needed}"
        )
    return float((scores[members].double() > outside[rank - 1]).double().mean())


def _is_one_sided(members: Tensor) -> bool:
    return bool(members.all()) or not bool(members.any())
