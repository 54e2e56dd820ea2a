"""A reconstruction against the truth: every metric, on one assignment."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring import image
from fedsim.scoring.features import (
    check_features,
    feature_cosine,
    feature_error,
    principal_angles,
    subspace_error,
)
from fedsim.scoring.labels import check_labels, label_overlap, matched_labels
from fedsim.scoring.matching import MISSING, align, match
from fedsim.scoring.outcome import ScoringError, Unavailable
from fedsim.scoring.perceptual import LpipsMetric
from fedsim.types import GroundTruth, Reconstruction

Metric = Literal[
    "rmse",
    "psnr",
    "ssim",
    "lpips",
    "feature_error",
    "feature_cosine",
    "subspace_error",
    "principal_angle",
    "label_accuracy",
    "row_error",
    "row_cosine",
    "rows_recovered",
    "membership_auc",
    "membership_tpr",
    "attack_loss",
]
METRICS: tuple[Metric, ...] = get_args(Metric)
_OF_FEATURES: tuple[Metric, ...] = (
    "feature_error",
    "feature_cosine",
    "subspace_error",
    "principal_angle",
)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How near a reconstruction came. Means over the batch; None is what does not apply."""

    rmse: float | None = None
    """Of pixels in [0, 1]."""
    psnr: float | None = None
    """dB, each image capped at 60."""
    ssim: float | None = None
    lpips: float | None = None
    feature_error: float | None = None
    feature_cosine: float | None = None
    subspace_error: float | None = None
    principal_angle: float | None = None
    """Degrees."""
    label_accuracy: float | None = None
    row_error: float | None = None
    """Squared distance of a row over its squared length."""
    row_cosine: float | None = None
    rows_recovered: float | None = None
    """Share of the targets all of whose entries came near."""
    membership_auc: float | None = None
    membership_tpr: float | None = None
    """True positive rate where few are falsely accused (`rows.FALSE_POSITIVES`)."""
    attack_loss: float | None = None
    """The attack's own objective; of no meaning across attacks."""
    per_image: dict[str, list[float]]
    """Metric -> one value per true image or row that is scored, in the order of the truth;
    principal angles ascending."""
    assignment: list[int]
    """Which reconstruction was scored against each truth; -1: none. Empty for labels alone."""
    missing: int
    """True images without a reconstruction that no guess stood in for: no metric of images is of
    them."""
    notes: dict[str, str]
    """Metric -> why it is None, or how it was computed where values compare only like with like."""

    def metrics(self) -> dict[str, float | None]:
        """The means by name, as a results row holds them."""
        return {name: getattr(self, name) for name in METRICS}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return asdict(self)


def score(
    reconstruction: Reconstruction,
    truth: GroundTruth,
    *,
    lpips: LpipsMetric | Unavailable | None = None,
    guess: Tensor | None = None,
) -> Scores:
    """Score `reconstruction` against `truth`.

    One assignment serves all metrics: it is made by the mean squared error of the images, or of the
    directions of the features where there are no images. Labels that come with images or features
    are those of the matched ones; labels alone are compared as multisets. A truth without a
    reconstruction counts as `guess` ((C, H, W) pixels), as zero features, and as a wrong label.
    Where no `guess` is known its image is not scored but `missing`, for any pixels in its place
    would be an invention.

    Raises:
        ScoringError: images, features or labels are not what `Reconstruction` promises (pixels
            outside [0, 1], values that are not finite, other shapes), or there are none at all.
    """
    _check(reconstruction, truth)
    assignment = _assignment(reconstruction, truth)
    found: dict[Metric, Tensor | Unavailable] = {}
    missing = 0
    if reconstruction.images is not None:
        wanted = truth.images.detach().cpu()
        if guess is None:
            met = [place for place, k in enumerate(assignment) if k != MISSING]
            missing = len(assignment) - len(met)
            claimed = reconstruction.images.detach().cpu()[[assignment[place] for place in met]]
            wanted = wanted[met]
        else:
            claimed = matched_images(reconstruction.images, assignment, guess)
        found |= _image_metrics(claimed, wanted, lpips)
    if reconstruction.features is not None:
        found |= _feature_metrics(reconstruction.features.detach().cpu(), truth, assignment)
    means: dict[Metric, float] = {}
    if reconstruction.labels is not None:
        if assignment:
            found["label_accuracy"] = matched_labels(
                reconstruction.labels, truth.labels, assignment
            )
        else:
            means["label_accuracy"] = label_overlap(reconstruction.labels, truth.labels)
    if math.isfinite(reconstruction.loss):
        means["attack_loss"] = reconstruction.loss
    values = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    notes = {name: value.reason for name, value in found.items() if isinstance(value, Unavailable)}
    if "lpips" in values and isinstance(lpips, LpipsMetric):
        notes["lpips"] = lpips.describe(*truth.images.shape[-2:])
    return Scores(
        **means,
        **{name: float(value.mean()) for name, value in values.items()},
        per_image={name: value.tolist() for name, value in values.items()},
        assignment=assignment,
        missing=missing,
        notes={str(name): note for name, note in notes.items()},
    )


def matched_images(images: Tensor, assignment: list[int], guess: Tensor) -> Tensor:
    """Reconstructed `images` in the order of the truths, exactly as they are scored: (N, C, H, W).

    `guess` as in `score`.
    """
    images = images.detach().cpu()
    return align(images, assignment, guess.detach().cpu().to(images.dtype))


def _image_metrics(
    claimed: Tensor, truth: Tensor, lpips: LpipsMetric | Unavailable | None
) -> dict[Metric, Tensor | Unavailable]:
    return {
        "rmse": image.rmse(claimed, truth),
        "psnr": image.psnr(claimed, truth),
        "ssim": image.ssim(claimed, truth),
        "lpips": _perceptual(claimed, truth, lpips),
    }


def _feature_metrics(
    claimed: Tensor, truth: GroundTruth, assignment: list[int]
) -> dict[Metric, Tensor | Unavailable]:
    if truth.features is None:
        missing = Unavailable("the true features were not recorded")
        return dict.fromkeys(_OF_FEATURES, missing)
    wanted = truth.features.detach().cpu()
    features = align(claimed, assignment, torch.zeros_like(wanted[0]))
    return {
        "feature_error": feature_error(features, wanted),
        "feature_cosine": feature_cosine(features, wanted),
        "subspace_error": subspace_error(claimed, wanted),
        "principal_angle": principal_angles(claimed, wanted),
    }


def _perceptual(
    claimed: Tensor, truth: Tensor, lpips: LpipsMetric | Unavailable | None
) -> Tensor | Unavailable:
    if lpips is None:
        return Unavailable("LPIPS was not asked for")
    if isinstance(lpips, Unavailable):
        return lpips
    if truth.shape[1] not in (1, 3):
        return Unavailable(f"LPIPS needs 1 or 3 channels, these images have {truth.shape[1]}")
    return lpips(claimed, truth)


def _assignment(reconstruction: Reconstruction, truth: GroundTruth) -> list[int]:
    if reconstruction.images is not None:
        return match(reconstruction.images.detach().cpu(), truth.images.detach().cpu())
    claimed, wanted = reconstruction.features, truth.features
    if claimed is not None and wanted is not None:
        # By direction: an attack need not know the norms.
        return match(
            *(F.normalize(f.detach().cpu().double(), eps=1e-30) for f in (claimed, wanted))
        )
    return []


def _check(reconstruction: Reconstruction, truth: GroundTruth) -> None:
    image.check_pixels(truth.images, "truth")
    check_labels(truth.labels, "truth")
    parts: dict[str, Tensor] = {}
    if reconstruction.images is not None:
        image.check_pixels(reconstruction.images, "reconstruction")
        _same_shape("images", reconstruction.images, truth.images)
        parts["images"] = reconstruction.images
    if reconstruction.features is not None:
        check_features(reconstruction.features, "reconstruction")
        if truth.features is not None:
            check_features(truth.features, "truth")
            _same_shape("features", reconstruction.features, truth.features)
        parts["features"] = reconstruction.features
    if reconstruction.labels is not None:
        check_labels(reconstruction.labels, "reconstruction")
        parts["labels"] = reconstruction.labels
    if not parts:
        raise ScoringError("the reconstruction is empty: no images, no features, no labels")
    counts = {name: len(part) for name, part in parts.items()}
    if len(set(counts.values())) > 1:
        raise ScoringError(
            f"the reconstruction's parts do not belong together: {counts}; expected as many of each"
        )


def _same_shape(what: str, claimed: Tensor, wanted: Tensor) -> None:
    if claimed.shape[1:] != wanted.shape[1:]:
        raise ScoringError(
            f"reconstructed {what} are {tuple(claimed.shape[1:])} each, "
            f"the truth's are {tuple(wanted.shape[1:])}"
        )
