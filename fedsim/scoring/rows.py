"""Scores of attacks on rows: how near each target came, and who was told from whom.

Entries are on [-1, 1], each column's declared range; RMSE and PSNR take them to [0, 1] first, as
pixels are, so that a decibel means the same. The constant feature is no data and is not scored. A
target is asked for by itself, so that rows are scored in their order and never matched. Where a row
ends with an entry for each class, the largest is its label.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring import image
from fedsim.scoring.outcome import ScoringError, Unavailable
from fedsim.scoring.score import METRICS, Metric, Scores
from fedsim.types import Reconstruction, RowTruth

TOLERANCE = 0.05
"""A row is recovered if every entry is within this share of its column's range."""

FALSE_POSITIVES = 0.05
"""Of those that took no part, the share that may be accused where true positives are counted."""

_SLACK = 1e-6
"""Rounding beyond [-1, 1]."""


def score_rows(found: Reconstruction, truth: RowTruth) -> Scores:
    """Score recovered rows (one per member) or memberships (one per candidate).

    Raises:
        ScoringError: they are not what `Reconstruction` promises, or there are neither.
    """
    values: dict[Metric, Tensor | Unavailable] = {}
    means: dict[Metric, float] = {}
    notes: dict[str, str] = {}
    if found.rows is not None:
        values |= _of_rows(found.rows, truth)
    if found.membership is not None:
        for name, told in _of_membership(found.membership, truth.members).items():
            if isinstance(told, Unavailable):
                notes[name] = told.reason
            else:
                means[name] = told
    if found.rows is None and found.membership is None:
        raise ScoringError("the reconstruction is empty: no rows, no memberships")
    if math.isfinite(found.loss):
        means["attack_loss"] = found.loss
    known = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    notes |= {name: v.reason for name, v in values.items() if isinstance(v, Unavailable)}
    return Scores(
        **means,
        **{name: float(value.mean()) for name, value in known.items()},
        per_image={name: value.tolist() for name, value in known.items()},
        assignment=[],
        missing=0,
        notes=notes,
    )


def row_baseline(truth: RowTruth) -> dict[str, float | None]:
    """Metrics of the zero-information guess, which knows the other rows but saw no release.

    It answers the mean of the others (with none: the middle of every range), and tosses a coin on
    who took part.
    """
    members = truth.rows[truth.members]
    metrics: dict[str, float | None] = dict.fromkeys(METRICS)
    if len(members):
        guess = (members.sum(0) - members) / max(1, len(members) - 1)
        answer = Reconstruction(rows=guess, loss=math.nan, iterations=0)
        metrics |= score_rows(answer, truth).metrics()
    return metrics | {"membership_auc": 0.5, "membership_tpr": FALSE_POSITIVES}


def membership_auc(scores: Tensor, members: Tensor) -> float:
    """Probability that a member's score is above a non-member's; ties count half."""
    inside, outside = scores[members].double(), scores[~members].double()
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside, side="left")
    level = torch.searchsorted(ordered, inside, side="right") - below
    return float((below.double() + 0.5 * level).mean() / len(outside))


def membership_tpr(scores: Tensor, members: Tensor, false_positives: float) -> float | Unavailable:
    """Share of members above the lowest threshold with no more than so many false positives.

    Expected of a non-member that is not among those the threshold is chosen by: above the k-th
    highest of n are k / (n + 1) of others.
    """
    outside = scores[~members].double().sort(descending=True).values
    rank = math.floor(false_positives * (len(outside) + 1) + 1e-9)
    if rank == 0:
        needed = math.ceil(1 / false_positives - 1e-9) - 1
        return Unavailable(
            f"{len(outside)} candidates took no part; a rate of {false_positives:g} takes {needed}"
        )
    return float((scores[members].double() > outside[rank - 1]).double().mean())


def _of_rows(rows: Tensor, truth: RowTruth) -> dict[Metric, Tensor | Unavailable]:
    wanted = truth.rows[truth.members]
    if rows.shape != wanted.shape:
        raise ScoringError(
            f"recovered rows are {tuple(rows.shape)}, those that took part {tuple(wanted.shape)}"
        )
    if not bool((rows.abs() <= 1 + _SLACK).all()):
        raise ScoringError("recovered rows have entries beyond [-1, 1], or none that are finite")
    claimed, wanted = rows[:, truth.scored].double(), wanted[:, truth.scored].double()
    length = wanted.square().sum(1)
    distance = (claimed - wanted).square().sum(1)
    near = (claimed - wanted).abs().amax(1) <= 2 * TOLERANCE
    found: dict[Metric, Tensor | Unavailable] = {
        "rmse": image.rmse((claimed + 1) / 2, (wanted + 1) / 2),
        "psnr": image.psnr((claimed + 1) / 2, (wanted + 1) / 2),
        "row_error": Unavailable("a true row is zero, so there is no relative error"),
        "row_cosine": F.cosine_similarity(claimed, wanted, dim=1, eps=1e-30),
        "rows_recovered": near.double(),
    }
    if bool(length.all()):
        found["row_error"] = distance / length
    if truth.classes:
        said, true = (part[:, -truth.classes :] for part in (rows, truth.rows[truth.members]))
        found["label_accuracy"] = (said.argmax(1) == true.argmax(1)).double()
    return found


def _of_membership(scores: Tensor, members: Tensor) -> dict[Metric, float | Unavailable]:
    if scores.shape != members.shape or bool(scores.isnan().any()):
        raise ScoringError(
            f"expected a score of each of {len(members)} candidates, none of them NaN, got "
            f"{tuple(scores.shape)}"
        )
    if bool(members.all()) or not bool(members.any()):
        return {"membership_auc": Unavailable("all candidates took part, or none did")}
    return {
        "membership_auc": membership_auc(scores, members),
        "membership_tpr": membership_tpr(scores, members, FALSE_POSITIVES),
    }
