"""Scores the zero-information guess: the answer of someone who saw no update and no release."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring.guess import Guess
from fedsim.scoring.metrics import METRICS, Pair, compare
from fedsim.scoring.outcome import Unavailable
from fedsim.scoring.perceptual import LpipsMetric
from fedsim.scoring.score import Scores, score, score_rows
from fedsim.types import GroundTruth, Reconstruction, RowTruth


def baseline(
    guess: Guess,
    truth: GroundTruth,
    *,
    labels_alone: bool = False,
    lpips: LpipsMetric | Unavailable | None = None,
) -> Scores:
    """Returns the scores of `guess`, matched to the truths as an attack's answer is.

    Args:
        guess: of the batch.
        truth: of the batch.
        labels_alone: whether the attack that it is compared with answers nothing but labels.
        lpips: how images are compared perceptually; None if they are not.

    Raises:
        ScoringError: the images do not fit the truth.
    """
    return score(guess.answer(labels_alone=labels_alone), truth, lpips=lpips)


def feature_baseline(public: Tensor, truth: Tensor) -> dict[str, float]:
    """Returns the metrics of guessing the features `truth` (N, d) from `public` ones (P, d).

    The guess of the span is the N directions that public features of unit length share most: they
    leave least of those features outside, in mean square. The guess of each feature is the public
    mean. A metric without a value for this truth is left out.
    """
    truth = truth.detach().cpu()
    units = F.normalize(public.double(), dim=1)
    _, _, directions = torch.linalg.svd(units, full_matrices=False)
    mean = public.double().mean(0).expand(len(truth), -1)
    guess = Pair(claimed=mean, truth=truth, unordered=directions[: len(truth)])
    values = compare("features", guess)
    return {name: float(v.mean()) for name, v in values.items() if isinstance(v, Tensor)}


def row_baseline(truth: RowTruth) -> dict[str, float | None]:
    """Returns the metrics of a guess from the other rows, without the release.

    It answers the mean of the others (with none: the middle of every range), and tosses a coin on
    who took part.
    """
    members = truth.rows[truth.members]
    metrics: dict[str, float | None] = dict.fromkeys(METRICS)
    if len(members):
        guess = (members.sum(0) - members) / max(1, len(members) - 1)
        answer = Reconstruction(rows=guess, loss=math.nan, iterations=0)
        metrics |= score_rows(answer, truth).metrics()
    coin = {name: m.uninformed for name, m in METRICS.items() if "membership" in m.functions}
    return metrics | coin
