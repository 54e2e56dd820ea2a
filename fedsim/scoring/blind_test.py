"""Tests whether members could be told from others without looking at any update.

Membership is measured by candidates that differ in nothing but a coin. If members and others come
from different data, or one of them is a copy of another, then high scores say nothing of the
update (Das, Zhang and Tramèr, Blind Baselines Beat Membership Inference Attacks for Foundation
Models, 2024). Such candidates are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.metric import ScoringError
from fedsim.scoring.statistics import area_deviation, rank_area
from fedsim.types import CANDIDATE_INPUTS, CANDIDATE_LABELS, CANDIDATE_MEMBERS, Truth

FALSE_REFUSALS = 1e-6
"""Probability that candidates that differ in nothing but fair coins are refused as unlike."""

_PROJECTIONS = 64
"""Number of random projections of an input that the blind classifier looks at, at most."""
_LEAST = 40
"""Number of candidates below which no difference could be certain."""


def refuse_unlike(truth: Truth) -> None:
    """Refuses candidates of an update whose members differ from others by more than a coin.

    Raises:
        ScoringError: a member is a copy of another candidate that took no part, or a classifier
            that sees inputs and labels alone tells members from others.
    """
    tensors = truth.tensors()
    if CANDIDATE_INPUTS not in tensors:
        return
    inputs, members = tensors[CANDIDATE_INPUTS], tensors[CANDIDATE_MEMBERS]
    digests = [rng.of_bytes(each.contiguous().numpy().tobytes()) for each in inputs.cpu()]
    inside = {digest for digest, member in zip(digests, members.tolist(), strict=True) if member}
    for index, digest in enumerate(digests):
        if not members[index] and digest in inside:
            raise ScoringError(
                f"candidate {index} took no part and is a copy of one that did, so that no score "
                "can tell them apart; remove copies from the data"
            )
    p = blind_p_value(inputs, tensors[CANDIDATE_LABELS], members)
    if p < FALSE_REFUSALS:
        raise ScoringError(
            f"members are told from others without any update (p = {p:.1g}), so that their data "
            "differ by more than a fair coin; draw candidates from one distribution"
        )


def blind_p_value(inputs: Tensor, labels: Tensor, members: Tensor) -> float:
    """Returns the p-value of the hypothesis that coins alone tell members from others.

    It is 1 for fewer than 40 candidates, or where a half has no member or no other. `inputs` are
    (N, ...), `labels` (N,) int64 and `members` (N,) bool.
    """
    if len(members) < _LEAST:
        return 1.0
    shown = _features(inputs.cpu(), labels.cpu())
    # Fitted on one half and tested on the other: a fit memorises its own coins.
    half = torch.arange(len(members)) % 2 == 0
    coins = members.cpu()
    p_values = [
        _rank_p_value(shown[test] @ _fit(shown[~test], coins[~test]), coins[test])
        for test in (half, ~half)
    ]
    # Bonferroni: either of two tests may refuse.
    return min(1.0, 2 * min(p_values))


def _features(inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns (N, k) standardized features: projections, mean, spread and class."""
    flat = inputs.flatten(1).double()
    # Few enough that a fit to half of the candidates generalizes.
    count = max(1, min(_PROJECTIONS, flat.shape[1], len(flat) // 10))
    # The seed is fixed, so that the same candidates always pass or are always refused.
    directions = torch.randn(
        flat.shape[1], count, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    classes = torch.nn.functional.one_hot(labels).double()
    spread = flat.std(1, keepdim=True) if flat.shape[1] > 1 else flat
    found = torch.cat([flat @ directions, flat.mean(1, keepdim=True), spread, classes], dim=1)
    return (found - found.mean(0)) / found.std(0).clamp(min=1e-9)


def _fit(shown: Tensor, members: Tensor) -> Tensor:
    """Returns the weights (k,) of a ridge regression of the coins."""
    gram = shown.T @ shown
    ridge = 0.1 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    # Features have mean 0, so that coins of ±1/2 need no intercept.
    weights: Tensor = torch.linalg.solve(gram + ridge, shown.T @ (members.double() - 0.5))
    return weights


def _rank_p_value(scores: Tensor, members: Tensor) -> float:
    """Returns the one-sided p-value of Mann and Whitney's test, by its normal limit."""
    inside, outside = scores[members], scores[~members]
    if not len(inside) or not len(outside):
        return 1.0
    z = (rank_area(inside, outside) - 0.5) / area_deviation(len(inside), len(outside))
    return 0.5 * math.erfc(z / math.sqrt(2))
