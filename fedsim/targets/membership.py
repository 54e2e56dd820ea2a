"""Scores membership: whether a given row or candidate took part, if only the update can tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.metric import Metric, ScoringError, Term, Unavailable, ordered
from fedsim.contracts.target import Aids, GuessRequest, Target, TargetGuess
from fedsim.scoring.statistics import area_deviation, rank_area, share
from fedsim.types import (
    CANDIDATE_INPUTS,
    CANDIDATE_LABELS,
    CANDIDATE_MEMBERS,
    Reconstruction,
    Tensors,
    Truth,
)

FALSE_POSITIVES = 0.05
"""Largest share of non-members accused at the threshold where true positives are counted."""
LOW_RATES = {"1_percent": 0.01, "01_percent": 0.001}
"""Ending of a metric's name -> the rate of false accusations at which it counts members."""
CONFIDENCE = 0.95


def membership_auc(scores: Tensor, members: Tensor) -> float | Unavailable:
    """Returns the probability that a member's score is above a non-member's; ties count half.

    `scores` are (N,), and `members` (N,) bool say which candidates took part. An `Unavailable` says
    that all took part, or none.
    """
    if _is_one_sided(members):
        return Unavailable("all candidates took part, or none did")
    return rank_area(scores[members], scores[~members])


def membership_auc_beyond_chance(scores: Tensor, members: Tensor) -> float | Unavailable:
    """Returns `membership_auc` less 1.96 standard deviations that it has by guessing, at least 0.

    `scores`, `members` and an `Unavailable` are as there.
    """
    area = membership_auc(scores, members)
    if isinstance(area, Unavailable):
        return area
    return max(0.0, area - 1.96 * area_deviation(int(members.sum()), int((~members).sum())))


def membership_tpr(
    scores: Tensor, members: Tensor, false_positives: float = FALSE_POSITIVES
) -> float | Unavailable:
    """Returns the share of members whose score is above a threshold that few non-members exceed.

    The threshold is the lowest at which the rate of non-members above it is at most
    `false_positives`. That rate is the one expected of a further non-member: k / (n + 1) for the
    k-th highest of n scores. `scores` are (N,), and `members` (N,) bool. An `Unavailable` says that
    all took part, or none, or that non-members are too few for this rate.
    """
    if _is_one_sided(members):
        return Unavailable("all candidates took part, or none did")
    outside = scores[~members].double().sort(descending=True).values
    rank = accused_others(len(outside), false_positives)
    if rank == 0:
        # Even the highest score is exceeded by 1 / (n + 1) of others, which has to be few enough.
        needed = math.ceil(1 / false_positives - 1e-9) - 1
        return Unavailable(
            f"{len(outside)} candidates took no part; a rate of {false_positives:g} takes {needed}"
        )
    return float((scores[members].double() > outside[rank - 1]).double().mean())


def accused_others(others: int, false_positives: float) -> int:
    """Returns k: the k-th highest score of `others` non-members is the threshold at that rate.

    It is 0 if they are too few for the rate `false_positives` in (0, 1), see `membership_tpr`.
    """
    # The slack keeps products whole that rounding takes to just below.
    return math.floor(false_positives * (others + 1) + 1e-9)


def _membership_tpr_end(
    scores: Tensor, members: Tensor, false_positives: float, end: int
) -> float | Unavailable:
    """Returns `end` 0 or 1 of the 95% interval of the share of `membership_tpr` (1934)."""
    # Clopper and Pearson's takes the threshold as given, and its rate is uncertain itself: the
    # share at exactly 1% lies outside in about half of all trials, at 0.1% in up to three of four.
    told = membership_tpr(scores, members, false_positives)
    if isinstance(told, Unavailable):
        return told
    asked = int(members.sum())
    found = share(round(told * asked), asked, confidence=CONFIDENCE)
    return (found.low, found.high)[end]


def _is_one_sided(members: Tensor) -> bool:
    return bool(members.all()) or not bool(members.any())


_MEMBERSHIP = Term(
    key="membership",
    name="AUC, TPR",
    meaning="How well members are told from others. AUC: the chance that a member is accused "
    "before another, 0.5 for a coin. TPR: share of members accused at "
    f"{FALSE_POSITIVES:.0%} false accusations.",
)


def _share_and_ends(ending: str, rate: float) -> tuple[Metric, ...]:
    """Returns the metric of the share of members told at `rate`, and those of its interval."""
    name = f"membership_tpr_at_{ending}"
    share = Metric(
        name=name,
        compute=ordered(partial(membership_tpr, false_positives=rate)),
        unit="share",
        larger_leaks=True,
        uninformed=rate,
        heading=f"TPR at {rate:.1%}",
        meaning=f"share of members told from others, at {rate:.1%} false accusations",
        described=_MEMBERSHIP,
        shown_as="percent",
    )
    ends = (
        Metric(
            name=f"{name}_{word}",
            compute=ordered(partial(_membership_tpr_end, false_positives=rate, end=end)),
            unit="share",
            larger_leaks=True,
        )
        for end, word in enumerate(("low", "high"))
    )
    return (share, *ends)


class Membership(Target):
    """Scores who took part, by scores of candidates, the higher the likelier."""

    part: ClassVar[str] = "membership"
    """Name of answers (N,); the truth is (N,) bool, of a client's candidates or a table's rows."""
    noun: ClassVar[str] = "members"
    singular: ClassVar[str] = "member"
    order: ClassVar[float] = 4.0
    saved_as: ClassVar[tuple[str, str] | None] = ("membership", "members")
    ranks_by: ClassVar[Any] = "gain"
    leaks: ClassVar[float] = 0.05
    works: ClassVar[float | None] = 0.25
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="membership_auc",
            compute=ordered(membership_auc),
            unit="share",
            larger_leaks=True,
            uninformed=0.5,
            heading="AUC",
            meaning="of membership: the chance that a member is accused before another",
            described=_MEMBERSHIP,
            shown_as="interval",
            narrow="kept",
        ),
        Metric(
            name="membership_tpr",
            compute=ordered(membership_tpr),
            unit="share",
            larger_leaks=True,
            uninformed=FALSE_POSITIVES,
            heading="TPR",
            meaning=f"of membership, at {FALSE_POSITIVES:.0%} false positives",
            described=_MEMBERSHIP,
            shown_as="percent",
        ),
        Metric(
            name="membership_auc_beyond_chance",
            compute=ordered(membership_auc_beyond_chance),
            unit="share",
            larger_leaks=True,
        ),
        # Numbers of candidates, whatever their scores.
        *(
            Metric(name=name, compute=ordered(count), unit="none", larger_leaks=True, digits=0)
            for name, count in (
                ("membership_others", lambda _, members: float((~members).sum())),
                ("membership_members", lambda _, members: float(members.sum())),
            )
        ),
        *(metric for ending, rate in LOW_RATES.items() for metric in _share_and_ends(ending, rate)),
    )

    @property
    def truth_name(self) -> str:
        """Name of the truth's tensor of rows, `members`; `truth_of` prefers `candidate_members`."""
        return "members"

    def truth_of(self, truth: Truth) -> Tensor | None:
        """Returns whether each candidate took part, (N,) bool; None if there are no candidates."""
        tensors = truth.tensors()
        return tensors.get(CANDIDATE_MEMBERS, tensors.get(self.truth_name))

    def tensors_to_save(
        self, found: Reconstruction, truth: Truth, assignments: Mapping[str, list[int]], aids: Aids
    ) -> dict[str, Tensor]:
        """Returns scores `membership` (N,) and the truth, (N,) bool, by the key of `read_saved`.

        It is empty if either is missing.
        """
        saved = super().tensors_to_save(found, truth, assignments, aids)
        if saved and CANDIDATE_MEMBERS in truth.tensors():
            # A truth of "members" would be read back as one of rows.
            saved[CANDIDATE_MEMBERS] = saved.pop(self.truth_name)
        return saved

    def read_saved(self, tensors: Tensors) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns (scores (N,) or None, {key: who took part, (N,) bool}) from saved `tensors`.

        The key is `candidate_members`, or `members` of a table's rows; without either, {} is left.
        """
        if CANDIDATE_MEMBERS not in tensors:
            return super().read_saved(tensors)
        return tensors.get(self.part), {CANDIDATE_MEMBERS: tensors[CANDIDATE_MEMBERS]}

    def check(self, answer: Tensor, truth: Truth) -> None:
        """Raises a ScoringError unless `answer` is a score, maybe infinite, of each candidate.

        It refuses candidates, too, if one that took no part is a copy of one that did, or if a
        classifier of inputs and labels tells members apart (`blind_p_value` below 1e-6).
        """
        members = self.truth_of(truth)
        if members is None:
            raise ScoringError("candidates were scored, and the truth names none")
        if answer.shape != members.shape or bool(answer.isnan().any()):
            raise ScoringError(
                f"expected a score of each of {len(members)} candidates, none of them NaN, got "
                f"{tuple(answer.shape)}"
            )
        _refuse_unlike(truth)

    def guess(self, request: GuessRequest, aids: Aids) -> TargetGuess | None:
        """Returns the metrics of tossing a coin, some None; None itself without candidates."""
        if self.truth_of(request.truth) is None:
            return None
        return TargetGuess(metrics={metric.name: metric.uninformed for metric in self.metrics})

    def borrow(self, answer: Tensor, pairs: list[int], truth: Truth) -> Tensor:
        """Returns N of another update's scores (M,), repeated if M < N, for these N candidates."""
        # The scores are of other rows and should tell nothing about these, which makes the control.
        true = self.truth_of(truth)
        assert true is not None
        return answer[torch.arange(len(true)) % len(answer)]


FALSE_REFUSALS = 1e-6
"""Probability that candidates that differ in nothing but fair coins are refused as unlike."""
_PROJECTIONS = 64
"""Number of random projections of an input that the blind classifier looks at, at most."""
_LEAST = 40
"""Number of candidates below which no difference could be certain."""


def _refuse_unlike(truth: Truth) -> None:
    """Refuses candidates that a copy, or a classifier of inputs and labels alone, tells apart."""
    # High scores would else say nothing of the update (Das, Zhang and Tramèr, Blind Baselines Beat
    # Membership Inference Attacks for Foundation Models, 2024).
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
    """Returns the p-value of the hypothesis that coins alone tell members (N,) bool from others.

    Each half of the candidates tests a fit to the other, and twice the smaller p-value is returned,
    at most 1. A half without members or others has 1, and so have fewer than 40 candidates.
    `inputs` are (N, ...), and `labels` (N,) int64.
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
