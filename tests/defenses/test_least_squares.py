"""Coefficients and their noise: accounted at the worst row, whichever calibration chose σ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedsim.contracts.guarantee import ExactMechanism, Release
from fedsim.contracts.stack import chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.mechanisms import least_squares, projection
from fedsim.privacy.mechanisms.projection import bound
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.least_squares import LeastSquaresMechanism
from fedsim_defenses.random_projection import largest_leverage, largest_residual

DELTA = 1e-3
NORMAL = Release(kind="normal_coefficients", row_norm=1.5, columns=30, features=2)
SKETCHED = replace(NORMAL, kind="sketched_coefficients")
DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)


def mechanism(defense: LeastSquaresMechanism, release: Release) -> ExactMechanism:
    held = defense.guarantee(release).mechanism
    assert isinstance(held, ExactMechanism)
    return held


@pytest.mark.slow
def test_the_papers_noise_gives_more_than_it_is_asked_for() -> None:
    """It is more than enough here, and the ledger says by how much."""
    paper = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, calibration="paper")
    tight = LeastSquaresMechanism(epsilon=1.0, delta=DELTA)
    assert paper.sigma(NORMAL) > tight.sigma(NORMAL)
    stated = claim(
        chain(paper), DECLARED, Entry(rounds=1, num_examples=9, delta=DELTA, release=NORMAL)
    )
    held = mechanism(paper, NORMAL)
    assert stated.epsilon == held.epsilon(DELTA, 1) < 0.9
    assert held.epsilon(DELTA, 2) == pytest.approx(2 * held.epsilon(DELTA / 2, 1))
    assert stated.relation == "add_or_remove" and stated.unit == "example"


@pytest.mark.slow
def test_the_tight_noise_gives_what_is_asked_for() -> None:
    defense = LeastSquaresMechanism(epsilon=1.0, delta=DELTA)
    assert mechanism(defense, NORMAL).epsilon(DELTA, 1) == pytest.approx(1.0, rel=1e-5)


def test_coefficients_of_a_sketch_are_accounted_as_the_sketch() -> None:
    """Nothing more is proven of them for a finite number of columns."""
    for calibration in ("tight", "paper"):
        defense = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, calibration=calibration)
        most = bound(defense.sigma(SKETCHED), SKETCHED.row_norm, 1.0)
        expected = float(projection.epsilon(most, SKETCHED.columns, DELTA))
        assert mechanism(defense, SKETCHED).epsilon(DELTA, 1) == expected
        if calibration == "tight":
            assert expected == pytest.approx(1.0, rel=1e-9)


def test_what_is_known_of_the_leverage_saves_noise() -> None:
    allowed = float(projection.max_leverage(1.0, DELTA, SKETCHED.columns))
    inherent = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, leverage=allowed / 2)
    assert inherent.sigma(SKETCHED) == 0
    assert mechanism(inherent, SKETCHED).relation == "relative"
    some = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, leverage=2 * allowed)
    every = LeastSquaresMechanism(epsilon=1.0, delta=DELTA)
    assert 0 < some.sigma(SKETCHED) < every.sigma(SKETCHED)


@pytest.mark.parametrize("kind", ["sketch", "coefficients"])
def test_it_protects_nothing_but_random_coefficients(kind: str) -> None:
    with pytest.raises(FedsimError, match="method ls or als"):
        LeastSquaresMechanism(epsilon=1.0, delta=DELTA).sigma(replace(NORMAL, kind=kind))  # type: ignore[arg-type]


def table(rows: int, error: float) -> torch.Tensor:
    """Rows [B, b] with a target that is linear but for `error`."""
    drawn = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = drawn[:, :3].sum(1) + error * drawn[:, 3]
    return torch.column_stack([drawn[:, :3], target])


@pytest.mark.slow
def test_a_declared_residual_is_checked_and_saves_the_noise() -> None:
    rows = table(500, 1.0)
    most, share = largest_leverage(rows), largest_residual(rows)
    # The residual is what a row's leverage in [B, b] has above that in B.
    inverse, of_features = (torch.linalg.inv(each.T @ each) for each in (rows, rows[:, :-1]))
    q = ((rows @ inverse) * rows).sum(1)
    p = ((rows[:, :-1] @ of_features) * rows[:, :-1]).sum(1)
    assert share == pytest.approx(float((q - p).max()))
    release = replace(NORMAL, columns=30, features=3)
    known = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, leverage=most, residual=share)
    known.check({0: rows})
    assert known.sigma(release) == 0
    held = mechanism(known, release)
    assert held.relation == "relative" and 0 < held.epsilon(DELTA, 1) <= 1
    assert isinstance(held, least_squares.RegressionRelease)
    assert held.epsilon(DELTA, 1) <= replace(held, residual=1.0).epsilon(DELTA, 1)
    with pytest.raises(FedsimError, match=r"residual.*among the 500 rows of client 0"):
        LeastSquaresMechanism(epsilon=1.0, delta=DELTA, residual=0.9 * share).check({0: rows})
    assert largest_residual(table(9, 0.0)) == 1
