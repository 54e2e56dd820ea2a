"""Scores reconstructions by pure functions of them and the truth. Nothing here needs Flower."""

from fedsim.scoring.accuracy import Accuracy, accuracy, learning_problem
from fedsim.scoring.baselines import baseline, feature_baseline, row_baseline
from fedsim.scoring.certificates import Certificate, certificate, false_certificates
from fedsim.scoring.guess import Guesser, guess_problem, mean_image, near_copies
from fedsim.scoring.image import check_pixels, psnr
from fedsim.scoring.matching import MISSING, align
from fedsim.scoring.metrics import COMPARABLE, METRICS, Metric, Term
from fedsim.scoring.outcome import ScoringError, Unavailable
from fedsim.scoring.perceptual import Backbone, LpipsMetric, load_lpips
from fedsim.scoring.rows import FALSE_POSITIVES
from fedsim.scoring.score import Scores, matched_images, score, score_rows
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
    "COMPARABLE",
    "FALSE_POSITIVES",
    "LEAST",
    "METRICS",
    "MISSING",
    "Accuracy",
    "Backbone",
    "Certificate",
    "Guesser",
    "LpipsMetric",
    "Metric",
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
    "feature_baseline",
    "guess_problem",
    "learning_problem",
    "load_lpips",
    "matched_images",
    "mean_image",
    "near_copies",
    "psnr",
    "row_baseline",
    "score",
    "score_rows",
    "share",
    "student_interval",
    "summarize",
]
