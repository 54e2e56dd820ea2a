"""Random features to start a fit from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.head_features.spectral_features import span

_SPREAD = 0.5
"""Distance of starting features from their common direction, in units of it."""


def random_starts(head: HeadGradient, count: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Draws `count` starts (N, d): the common direction plus a random one in the likely span.

    By Stein's lemma the mean of ∂L/∂A_kj w_j over the planted neurons is in proportion to
    Σ_i D_ki x_i, a sum with one sign for a class that is not in the batch.
    """
    weights, outer = head.hidden[head.planted], head.grad_output[:, head.planted]
    moments = outer @ weights / len(weights) * outer.sum(1, keepdim=True).sign()
    likely = torch.linalg.svd(moments, full_matrices=False)[2][: min(head.rank, len(moments) - 1)]
    if len(likely) < head.rank:
        more = span(head.rows, head.rank)[0].to(likely.dtype)
        more = more - (more @ likely.T) @ likely
        extra = torch.linalg.svd(more, full_matrices=False)[2][: head.rank - len(likely)]
        likely = torch.cat([likely, extra])
    common = F.normalize(moments.sum(0), dim=0)
    unit = 1 / weights.std()
    for _ in range(count):
        mix = torch.randn(head.num_images, len(likely), generator=rng).to(likely)
        yield unit * F.normalize(common + _SPREAD * F.normalize(mix @ likely, dim=1), dim=1)
