"""The zero-information guess: what someone who saw no update at all would answer.

It knows the kind of data (its mean image, its most frequent label) but nothing of the victim, so
it is made from images other than the victim's. An attack leaks only what it gains over this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.scoring.outcome import ScoringError, Unavailable
from fedsim.scoring.perceptual import LpipsMetric
from fedsim.scoring.score import score
from fedsim.types import GroundTruth, Reconstruction

_CHUNK = 4096


@dataclass(frozen=True)
class Guess:
    """The zero-information guess of an image."""

    image: Tensor
    """(C, H, W) pixels."""
    label: int


def mean_image(images: Tensor, victims: Tensor | None = None) -> Tensor:
    """Pixel-wise mean of a pool of images: the constant guess of least squared error.

    `images` is (N, C, H, W), uint8 or pixels in [0, 1]; `victims` are indices of the images that
    the attacked update was computed from, which are left out. Needed unless the pool is disjoint
    from all victims, as a test split is. Returns (C, H, W) float32 pixels in [0, 1].

    Raises:
        ScoringError: no image is left.
    """
    kept = _others(len(images), victims)
    total = torch.zeros(images.shape[1:], dtype=torch.float64)
    for start in range(0, len(kept), _CHUNK):
        total += images[kept[start : start + _CHUNK]].double().sum(0)
    if not len(kept):
        raise ScoringError("the zero-information guess needs an image other than the victim's")
    scale = 1.0 if images.is_floating_point() else 255.0
    return (total / (len(kept) * scale)).float().clamp(0, 1)


def majority_label(labels: Tensor, victims: Tensor | None = None) -> int:
    """The most frequent label of a pool, (N,) int64; the least of several. `victims`: as above.

    Raises:
        ScoringError: no label is left.
    """
    kept = _others(len(labels), victims)
    if not len(kept):
        raise ScoringError("the zero-information guess needs a label other than the victim's")
    return int(labels[kept].bincount().argmax())


def baseline(
    image: Tensor,
    truth: GroundTruth,
    *,
    label: int | None = None,
    lpips: LpipsMetric | Unavailable | None = None,
) -> dict[str, float | None]:
    """Metrics of the guess that answers `image` (C, H, W) and `label` for each of the truths.

    Raises:
        ScoringError: the image does not fit the truth.
    """
    count = len(truth.labels)
    guess = Reconstruction(
        images=image.unsqueeze(0).repeat(count, 1, 1, 1),
        labels=None if label is None else torch.full((count,), label, dtype=torch.int64),
        loss=math.nan,  # it has no objective
        iterations=0,
    )
    return score(guess, truth, lpips=lpips).metrics()


def _others(count: int, victims: Tensor | None) -> Tensor:
    kept = torch.ones(count, dtype=torch.bool)
    if victims is not None:
        kept[victims] = False
    return kept.nonzero().flatten()
