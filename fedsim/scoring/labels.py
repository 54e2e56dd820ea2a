"""Compares inferred labels with a batch's true ones."""

from __future__ import annotations

from torch import Tensor

from fedsim.scoring.outcome import ScoringError


def check_labels(labels: Tensor, what: str) -> None:
    """Refuses what is not a batch of labels.

    Raises:
        ScoringError: not (N,), or not integers.
    """
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise ScoringError(
            f"{what}: expected integer labels of shape (N,), got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )


def label_overlap(reconstruction: Tensor, truth: Tensor) -> float:
    """Returns the multiset intersection's size over N, in [0, 1], for labels without images.

    The order of labels in a batch is not observable, only how often each occurs. Of more labels
    than truths the first N count.
    """
    claimed = reconstruction[: len(truth)].tolist()
    matches = 0
    for label in truth.tolist():
        if label in claimed:
            claimed.remove(label)
            matches += 1
    return matches / len(truth)


def right_label(claimed: Tensor, truth: Tensor) -> Tensor:
    """Returns 1 where the label of each pair (N,) is right, else 0; (N,) float64.

    For labels that come with images (or features): a right label on the wrong image is wrong.
    """
    return (claimed == truth).double()
