"""Edges: a metric of images that ranks attacks on them before their pixels do."""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from fedsim.contracts.metric import Metric, ordered
from fedsim.targets.images import RankedImages


def _alike(claimed: Tensor, truth: Tensor) -> Tensor:
    edges = [images.double().diff(dim=-1).flatten(1) for images in (claimed, truth)]
    lengths = [each.norm(dim=1).clamp_min(1e-12) for each in edges]
    cosine: Tensor = (edges[0] * edges[1]).sum(1) / (lengths[0] * lengths[1])
    return cosine


@final
class Edges(RankedImages):
    """Edges of a batch's images."""

    part: ClassVar[str] = "edges"
    leaks: ClassVar[float] = 0.2
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="edge_cosine",
            compute=ordered(_alike),
            unit="none",
            larger_leaks=True,
            heading="edges",
            meaning="mean cosine of horizontal differences",
        ),
    )
