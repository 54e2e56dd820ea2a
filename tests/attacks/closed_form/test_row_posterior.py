"""The mean of a row's posterior, against integrals on a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing import make_release
from fedsim.testing.cases import example_rows
from fedsim_attacks.closed_form._release_likelihood import ReleaseLikelihood
from fedsim_attacks.closed_form.row_reconstruction import Prior, RowPosterior, prior


@dataclass(frozen=True)
class Normal:
    """A release that is one entry, behind normal noise."""

    seen: float
    std: float

    def log_likelihood(self, rows: Tensor) -> Tensor:
        return -((rows[:, 0] - self.seen) / self.std).square() / 2


def posterior(seen: float, std: float, targets: tuple[float, ...], row_norm: float) -> RowPosterior:
    """Of (value, constant 1, target) rows; value and target are correlated before any release."""
    precision = torch.linalg.inv(
        torch.tensor([[0.4, 0.0, 0.3], [0.0, 1.0, 0.0], [0.3, 0.0, 0.5]], dtype=torch.float64)
    )
    prior = Prior(
        mean=torch.tensor([0.2, 1.0, -0.1], dtype=torch.float64),
        precision=precision,
        low=torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64),
        high=torch.ones(3, dtype=torch.float64),
        row_norm=row_norm,
        targets=targets,
    )
    return RowPosterior(likelihood=cast(ReleaseLikelihood, Normal(seen, std)), prior=prior)


@pytest.mark.parametrize("row_norm", [2.0, 1.1])
@pytest.mark.parametrize("targets", [(), (-1.0, 1.0)])
@pytest.mark.parametrize(("seen", "std"), [(0.9, 0.5), (-0.3, 0.2), (0.5, 50.0)])
def test_it_is_the_integral(
    seen: float, std: float, targets: tuple[float, ...], row_norm: float
) -> None:
    """Also where it is cut off at a range, and where a longer row is scaled to the bound."""
    case = posterior(seen, std, targets, row_norm)
    axis = torch.linspace(-1, 1, 801, dtype=torch.float64)
    last = torch.tensor(targets, dtype=torch.float64) if targets else axis
    value, target = torch.meshgrid(axis, last, indexing="ij")
    rows = torch.stack([value.flatten(), torch.ones(value.numel()), target.flatten()], 1)
    ends = torch.where(axis.abs() == 1, 0.5, 1.0).double()  # the trapezoidal rule
    area = (ends[:, None] * (1.0 if targets else ends[None])).expand_as(value).flatten()
    losses = case.loss(rows)
    weights = area * (losses.min() - losses).exp()
    expected = weights @ case.prior.scale_rows(rows) / weights.sum()
    best = rows[losses.argsort()[:1]]
    found = case.mean(list(best), 20_000, rng.generator(0, "posterior"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_other_rows_are_taken_as_they_were_before_they_were_scaled() -> None:
    """A row longer than the bound is scaled to it, and its constant feature tells by how much."""
    rows, members = example_rows(24)
    observation, _ = make_release(rows, members, learner="sketch", parameters={"columns": 9})
    scaled = rows * torch.linspace(0.5, 1.0, len(rows), dtype=torch.float64)[:, None]
    known, found = (
        prior(
            observation.release,
            Knowledge(grant=Grant.least(rows="others"), other_rows=(each,)),
            True,
        )
        for each in (rows, scaled)
    )
    torch.testing.assert_close(found.mean, known.mean)
    torch.testing.assert_close(found.precision, known.precision)
