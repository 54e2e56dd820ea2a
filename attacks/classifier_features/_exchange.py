"""Some images of a fit replaced by others: what a search for features and labels goes on from.

A fit that explains too little is mostly right: an image or two have a wrong label, or features of a
local minimum, and the others make up for it. Such images are found by replacing them, each time
others, and by fitting all again from there (a large neighbourhood search; Shaw, 1998). Starts that
are new in all images lose what is already right.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 3
"""Images that are replaced at once, at most."""


def exchanged(
    images: Tensor,
    labels: Tensor,
    drawn: Tensor,
    *,
    classes: int,
    failed: int,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Replaces some images of a fit, others in each of S starts.

    By an even chance a start keeps the labels of the images that it replaces, or draws others.

    Args:
        images: (N, u), the unknowns of each image.
        labels: (N,) of them.
        drawn: (S, N, u), what images are replaced by.
        classes: K, two or more.
        failed: rounds of exchanges in which nothing better was found: after one, two and three
            images are replaced at once, then one again.
        rng: draws images and labels.

    Returns:
        Unknowns (S, N, u) and labels (S, N).
    """
    starts, count = drawn.shape[:2]
    order = torch.rand(starts, count, generator=rng).argsort(1)
    replaced = order < min(count, 1 + failed % _MOST)
    others = (labels + torch.randint(1, classes, (starts, count), generator=rng)) % classes
    relabelled = replaced & (torch.rand(starts, 1, generator=rng) < 0.5)
    return torch.where(replaced[..., None], drawn, images), torch.where(relabelled, others, labels)
