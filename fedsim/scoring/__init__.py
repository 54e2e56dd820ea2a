"""Scores reconstructions by pure functions of them and the truth. Nothing here needs Flower."""

from fedsim.contracts.matching import MISSING, align
from fedsim.contracts.metric import Metric, ScoringError, Term, Unavailable
from fedsim.contracts.target import METRICS
from fedsim.scoring.accuracy import Accuracy, accuracy, learning_problem
from fedsim.scoring.certificates import Certificate, certificate, false_certificates
from fedsim.scoring.guess import Guesser, RowGuesser, guess_problem, mean_image, near_copies
from fedsim.scoring.image import check_pixels, psnr
from fedsim.scoring.perceptual import Backbone, LpipsMetric, load_lpips
from fedsim.scoring.score import (
    NOT_LEARNED,
    OWN_LOSS,
    Scores,
    baseline,
    no_metrics,
    prepare,
    read_saved,
    score,
    score_other,
    tensors_to_save,
)
from fedsim.scoring.statistics import (
    LEAST,
    Share,
    Summary,
    chance_of,
    share,
    student_interval,
    summarize,
)

__all__ = [
    "LEAST",
    "METRICS",
    "MISSING",
    "NOT_LEARNED",
    "OWN_LOSS",
    "Accuracy",
    "Backbone",
    "Certificate",
    "Guesser",
    "LpipsMetric",
    "Metric",
    "RowGuesser",
    "Scores",
    "ScoringError",
    "Share",
    "Summary",
    "Term",
    "Unavailable",
    "accuracy",
    "align",
    "baseline",
    "certificate",
    "chance_of",
    "check_pixels",
    "false_certificates",
    "guess_problem",
    "learning_problem",
    "load_lpips",
    "mean_image",
    "near_copies",
    "no_metrics",
    "prepare",
    "psnr",
    "read_saved",
    "score",
    "score_other",
    "share",
    "student_interval",
    "summarize",
    "tensors_to_save",
]
