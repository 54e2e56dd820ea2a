"""Labels of a batch by how well features with these labels reproduce the classifier's gradient.

Features of the wrong labels leave a thousandth of the gradient unexplained, and those of the right
ones what rounding leaves. So labels that were read off the gradient are the first of a search: what
explains more, after one image has got another label, is what the search goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def neighbours(labels: Tensor, likely: Tensor) -> Iterator[Tensor]:
    """Yields sorted labels (N,) that differ from `labels` in one image, likely ones first.

    `likely` (K,) is how often each class is expected: classes of which there are too many are
    taken from first, and those of which there are too few are given to first.
    """
    counts = torch.bincount(labels, minlength=len(likely))
    excess = counts - likely
    moves = [
        (float(excess[source] - excess[target]), source, target)
        for source in counts.nonzero()[:, 0].tolist()
        for target in range(len(likely))
        if source != target
    ]
    for _, source, target in sorted(moves, reverse=True):
        moved = labels.clone()
        moved[(labels == source).nonzero()[0]] = target
        yield moved.sort()[0]
