"""What is known of a row before any release: its columns' ranges, and rows like it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.contracts.grant import Knowledge
from fedsim.types import ReleaseSpec

_UNIFORM_VARIANCE = 1 / 3
"""Of a value that is uniform on [-1, 1]."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A normal distribution of rows before they are scaled to the bound, cut off at their ranges.

    Its mean and covariance are those of the other rows and of as many rows as there are columns of
    which nothing is known, so that few others do not make it too sure.
    """

    mean: Tensor
    """(d + 1,)."""
    precision: Tensor
    """(d + 1, d + 1)."""
    low: Tensor
    """(d + 1,) of each entry; the constant feature's is 1."""
    high: Tensor
    row_norm: float
    targets: tuple[float, ...]
    """What the target can be, if it is of two classes."""

    def log_density(self, rows: Tensor) -> Tensor:
        """Evaluates (k, d + 1) rows, up to a constant: (k,)."""
        deviation = rows - self.mean
        return -((deviation @ self.precision) * deviation).sum(1) / 2

    def scaled(self, rows: Tensor) -> Tensor:
        """Scales rows as clients do: longer ones down to the bound."""
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        scaled: Tensor = rows * (self.row_norm / norm.clamp_min(1e-300)).clamp(max=1)
        return scaled


def prior(spec: ReleaseSpec, knowledge: Knowledge, learned: bool) -> Prior:
    """Builds the target's prior: from the other rows if `learned`, else from what is public."""
    size = len(spec.names)
    low, high = -torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    rows = torch.zeros(0, size, dtype=torch.float64)
    if learned and knowledge.other_rows:
        rows = torch.cat(knowledge.other_rows)
    if spec.intercept:
        low[-2] = 1
        rows = rows / rows[:, -2:-1]  # undoes the scaling
    mean = rows.sum(0) / (len(rows) + 1)
    if spec.intercept:
        mean[-2] = 1
    deviation = rows - mean
    spread = _UNIFORM_VARIANCE * torch.eye(size, dtype=torch.float64)
    covariance = (deviation.T @ deviation + size * spread) / (len(rows) + size)
    return Prior(
        mean=mean,
        precision=torch.linalg.inv(covariance),
        low=low,
        high=high,
        row_norm=spec.row_norm,
        targets=(-1.0, 1.0) if spec.classes else (),
    )
