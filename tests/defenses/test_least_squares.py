"""Coefficients and their noise: accounted at the worst row, whichever calibration chose σ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedsim.contracts.guarantee import ExactMechanism, Release
from fedsim.contracts.stack import chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.mechanisms import least_squares, projection
from fedsim.privacy.mechanisms.leverage import bound
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.least_squares import LeastSquaresMechanism

DELTA = 1e-3
NORMAL = Release(kind="normal_coefficients", row_norm=1.5, columns=30, features=2)
SKETCHED = replace(NORMAL, kind="sketched_coefficients")
DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)


def mechanism(defense: LeastSquaresMechanism, release: Release) -> ExactMechanism:
    held = defense.guarantee(release).mechanism
    assert isinstance(held, ExactMechanism)
    return held


def test_the_tight_noise_is_enough_for_the_worst_row_and_no_more() -> None:
    defense = LeastSquaresMechanism(epsilon=1.0, delta=DELTA)
    sigma = defense.sigma(NORMAL)
    found = mechanism(defense, NORMAL)
    assert found.epsilon(DELTA, 1) == pytest.approx(1.0, rel=1e-5)
    most = bound(sigma, NORMAL.row_norm, 1.0)
    worst = least_squares.worst(most, 30, 2, 1.0)
    assert 0 <= worst.p <= worst.q <= most
    assert worst.log_delta == pytest.approx(math.log(DELTA), rel=1e-5)
    assert found.epsilon(DELTA, 2) == pytest.approx(2 * found.epsilon(DELTA / 2, 1))


def test_the_papers_noise_gives_more_than_it_is_asked_for() -> None:
    """It is more than enough here, and the ledger says by how much."""
    paper = LeastSquaresMechanism(epsilon=1.0, delta=DELTA, calibration="paper")
    tight = LeastSquaresMechanism(epsilon=1.0, delta=DELTA)
    assert paper.sigma(NORMAL) > tight.sigma(NORMAL)
    stated = claim(
        chain(paper), DECLARED, Entry(rounds=1, num_examples=9, delta=DELTA, release=NORMAL)
    )
    assert stated.epsilon == mechanism(paper, NORMAL).epsilon(DELTA, 1) < 0.9
    assert stated.relation == "add_or_remove" and stated.unit == "example"


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
