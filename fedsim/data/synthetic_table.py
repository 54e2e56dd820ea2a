"""Draws tables of any size, for measurements that depend on nothing but the size."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field

from fedsim.data.rows import RangeColumn, TableSource, TargetColumn
from fedsim.types import Table

_SPREAD = 1 / 3
"""Standard deviation of a feature and of the noise on the target, before they are clamped."""


@final
class SyntheticTable(TableSource):
    """Normal features and a linear target with as much noise as signal, all clamped to [-1, 1].

    The draw is a function of the size and `draw` alone, so every run sees the same table.
    """

    paper: ClassVar[str] = ""

    rows: Annotated[int, Field(ge=10, le=10_000_000)]
    """n, the number of training and test rows together."""
    features: Annotated[int, Field(ge=1, le=10_000)]
    """d, the number of features without the intercept."""
    draw: Annotated[int, Field(ge=0)] = 0
    """Seed of the draw; each gives another table of that size."""

    def load(self) -> Table:
        """Draws the table."""
        stream = torch.Generator().manual_seed(self.draw)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=stream, dtype=torch.float64)

        weights = normal(self.features)
        x = normal(self.rows, self.features) * _SPREAD
        noise = normal(self.rows) * _SPREAD
        # Weights of unit length give the signal the variance of one feature, which is that of the
        # noise.
        target = x.clamp_(-1, 1) @ (weights / torch.linalg.vector_norm(weights)) + noise
        columns = tuple(RangeColumn(name=f"x{i}", low=-1, high=1) for i in range(self.features))
        return self.table(
            "synthetic_table",
            x,
            columns,
            TargetColumn("y", target.clamp(-1, 1)),
            private_statistics=(),
        )
