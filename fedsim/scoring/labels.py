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
    """Returns the multiset intersection's size over N, in [0, 1].

    The order of labels in a batch is not observable, only how often each occurs. Labels that came
    with images count the same: poor images, matched to the wrong truths, take no label back. Of
    more labels than truths the first N count.
    """
    claimed = reconstruction[: len(truth)].tolist()
    matches = 0
    for label in truth.tolist():
        if label in claimed:
            claimed.remove(label)
            matches += 1
    return matches / len(truth)
