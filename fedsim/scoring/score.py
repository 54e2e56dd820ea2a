"""Scores a reconstruction against the truth: images, features and labels each by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.scoring import image
from fedsim.scoring.features import check_features
from fedsim.scoring.labels import check_labels
from fedsim.scoring.matching import MISSING, align, match
from fedsim.scoring.metrics import METRICS, Pair, Value, compare
from fedsim.scoring.outcome import ScoringError, Unavailable
from fedsim.scoring.perceptual import LpipsMetric
from fedsim.types import GroundTruth, Reconstruction, RowTruth

_SLACK = 1e-6
"""Rounding may take a row's entries this far beyond [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """States how close a reconstruction came, by the names of the table of metrics."""

    means: Mapping[str, float]
    """Metric -> mean over the batch; a metric that does not apply is missing."""
    per_image: dict[str, list[float]]
    """Metric -> one value per scored true image or row, in the order of the truth; principal angles
    ascending."""
    assignment: list[int]
    """Which reconstruction was scored against each truth; -1: none. Of features where there are no
    images. Empty for labels alone and for rows, which are never matched."""
    features_assignment: list[int]
    """As `assignment`, of features; empty without them."""
    missing: int
    """Number of true images without a reconstruction or a guess in its place; image metrics leave
    them out."""
    notes: dict[str, str]
    """Metric -> why it has no value, or how it was computed where only like values compare."""

    def __getitem__(self, name: str) -> float | None:
        """Returns the mean of the metric `name`; None if it does not apply."""
        return self.metrics()[name]

    def metrics(self) -> dict[str, float | None]:
        """Returns the means by name, as a results row holds them; None where one does not apply."""
        return {name: self.means.get(name) for name in METRICS}


def score(
    reconstruction: Reconstruction,
    truth: GroundTruth,
    *,
    lpips: LpipsMetric | Unavailable | None = None,
    guess: Tensor | None = None,
) -> Scores:
    """Scores `reconstruction` against `truth`.

    Each target counts by itself. Images are matched by their mean squared error, which serves all
    metrics of images; features by their directions; labels are compared as multisets. So poor
    images, which are matched at random, hide neither features nor labels. A truth without a
    reconstruction counts as `guess` ((C, H, W) pixels), as zero features, and as a wrong label.
    Where no `guess` is known its image is not scored but `missing`, for any pixels in its place
    would be an invention.

    Args:
        reconstruction: of an attack, or of the guess.
        truth: of the same batch.
        lpips: how images are compared perceptually; None if they are not.
        guess: (C, H, W) pixels that stand for a missing image; None if there are none.

    Raises:
        ScoringError: images, features or labels are not what `Reconstruction` promises (pixels
            outside [0, 1], values that are not finite, other shapes), or there are none at all.
    """
    _check(reconstruction, truth)
    features_assignment = _match_features(reconstruction, truth)
    assignment = features_assignment
    if reconstruction.images is not None:
        assignment = match(reconstruction.images.detach().cpu(), truth.images.detach().cpu())
    values: dict[str, Value] = {}
    missing = 0
    if reconstruction.images is not None:
        true_images = truth.images.detach().cpu()
        if guess is None:
            matched = [place for place, k in enumerate(assignment) if k != MISSING]
            missing = len(assignment) - len(matched)
            chosen = [assignment[place] for place in matched]
            claimed = reconstruction.images.detach().cpu()[chosen]
            true_images = true_images[matched]
        else:
            claimed = matched_images(reconstruction.images, assignment, guess)
        values |= compare("images", Pair(claimed=claimed, truth=true_images, lpips=lpips))
    if reconstruction.features is not None:
        claimed = reconstruction.features.detach().cpu()
        values |= _feature_metrics(claimed, truth, features_assignment)
    if reconstruction.labels is not None:
        values |= compare("labels", Pair(claimed=reconstruction.labels, truth=truth.labels))
    notes = {}
    if isinstance(values.get("lpips"), Tensor) and isinstance(lpips, LpipsMetric):
        notes["lpips"] = lpips.describe(*truth.images.shape[-2:])
    return replace(
        _scores(reconstruction, values, notes),
        assignment=assignment,
        features_assignment=features_assignment,
        missing=missing,
    )


def score_rows(reconstruction: Reconstruction, truth: RowTruth) -> Scores:
    """Scores recovered rows (one per member) or memberships (one per candidate).

    The constant feature is no data and is not scored. Where a row ends with an entry for each
    class, the largest is its label.

    Raises:
        ScoringError: they are not what `Reconstruction` promises, or there are neither.
    """
    values: dict[str, Value] = {}
    if (rows := reconstruction.rows) is not None:
        true_rows = truth.rows[truth.members]
        _check_rows(rows, true_rows)
        entries = [part[:, truth.scored].double() for part in (rows, true_rows)]
        values |= compare("rows", Pair(claimed=entries[0], truth=entries[1]))
        if truth.classes:
            classes = [part[:, -truth.classes :] for part in (rows, true_rows)]
            values |= compare("classes", Pair(claimed=classes[0], truth=classes[1]))
    if (scores := reconstruction.membership) is not None:
        if scores.shape != truth.members.shape or bool(scores.isnan().any()):
            raise ScoringError(
                f"expected a score of each of {len(truth.members)} candidates, none of them NaN, "
                f"got {tuple(scores.shape)}"
            )
        values |= compare("membership", Pair(claimed=scores, truth=truth.members))
    if reconstruction.rows is None and reconstruction.membership is None:
        raise ScoringError("the reconstruction is empty: no rows, no memberships")
    return _scores(reconstruction, values)


def _scores(
    reconstruction: Reconstruction,
    values: Mapping[str, Value],
    notes: Mapping[str, str] | None = None,
) -> Scores:
    """Collects means of the metrics that have a value, and the reasons of those that have none.

    Args:
        reconstruction: says the attack's own loss.
        values: metric -> its values, or why there are none.
        notes: metric -> how it was computed.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    means = {name: value for name, value in values.items() if isinstance(value, float)}
    if math.isfinite(reconstruction.loss):
        means["attack_loss"] = reconstruction.loss
    reasons = {name: v.reason for name, v in values.items() if isinstance(v, Unavailable)}
    return Scores(
        means={**means, **{name: float(value.mean()) for name, value in tensors.items()}},
        per_image={name: value.tolist() for name, value in tensors.items()},
        assignment=[],
        features_assignment=[],
        missing=0,
        notes={**reasons, **(notes or {})},
    )


def matched_images(images: Tensor, assignment: list[int], guess: Tensor) -> Tensor:
    """Orders reconstructed `images` as the truths, exactly as they are scored: (N, C, H, W).

    `guess` as in `score`.
    """
    images = images.detach().cpu()
    return align(images, assignment, guess.detach().cpu().to(images.dtype))


def _feature_metrics(
    claimed: Tensor, truth: GroundTruth, assignment: list[int]
) -> dict[str, Value]:
    if truth.features is None:
        missing = Unavailable("the true features were not recorded")
        return {name: missing for name, metric in METRICS.items() if "features" in metric.functions}
    true_features = truth.features.detach().cpu()
    features = align(claimed, assignment, torch.zeros_like(true_features[0]))
    return compare("features", Pair(claimed=features, truth=true_features, unordered=claimed))


def _match_features(reconstruction: Reconstruction, truth: GroundTruth) -> list[int]:
    claimed, true_features = reconstruction.features, truth.features
    if claimed is not None and true_features is not None:
        # By direction: an attack need not know the norms.
        return match(
            *(F.normalize(f.detach().cpu().double(), eps=1e-30) for f in (claimed, true_features))
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


def _same_shape(what: str, claimed: Tensor, truth: Tensor) -> None:
    if claimed.shape[1:] != truth.shape[1:]:
        raise ScoringError(
            f"reconstructed {what} are {tuple(claimed.shape[1:])} each, "
            f"the truth's are {tuple(truth.shape[1:])}"
        )


def _check_rows(rows: Tensor, true_rows: Tensor) -> None:
    if rows.shape != true_rows.shape:
        raise ScoringError(
            f"recovered rows are {tuple(rows.shape)}, those that took part {tuple(true_rows.shape)}"
        )
    if not bool((rows.abs() <= 1 + _SLACK).all()):
        raise ScoringError("recovered rows have entries beyond [-1, 1], or none that are finite")
