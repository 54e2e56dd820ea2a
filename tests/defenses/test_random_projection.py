"""Sketches and their noise: what is claimed is what the worst database has."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedsim.contracts.guarantee import ExactMechanism, Release
from fedsim.contracts.stack import chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.mechanisms import projection
from fedsim.privacy.mechanisms.projection import ProjectionRelease, bound, lowering
from fedsim.testing import DataDefenseContract
from fedsim.types import FedsimError, LocalTraining
from fedsim_defenses.aggregate import Aggregate
from fedsim_defenses.clip import Clip
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.random_projection import RandomProjection

DELTA = 1e-3
RELEASE = Release(kind="sketch", row_norm=1.5, columns=40, features=4)
DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=1, lr=1.0)


class TestSharedNoise(DataDefenseContract):
    def make(self) -> RandomProjection:
        return RandomProjection(epsilon=1.0, delta=DELTA, shared_among=9, calibration="paper")

    def release(self) -> Release:
        return RELEASE


def mechanism(defense: RandomProjection, release: Release = RELEASE) -> ExactMechanism:
    held = defense.guarantee(release).mechanism
    assert isinstance(held, ExactMechanism)
    return held


def spent(stack: tuple[object, ...], **changes: object) -> float:
    arguments = {"rounds": 1, "num_examples": 10, "delta": DELTA, "release": RELEASE, **changes}
    return claim(chain(*stack), DECLARED, Entry(**arguments)).epsilon  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_tight_noise_gives_exactly_what_is_asked(epsilon: float) -> None:
    tight = RandomProjection(epsilon=epsilon, delta=DELTA)
    paper = RandomProjection(epsilon=epsilon, delta=DELTA, calibration="paper")
    assert mechanism(tight).epsilon(DELTA, 1) == pytest.approx(epsilon, rel=1e-9)
    assert mechanism(paper).epsilon(DELTA, 1) < epsilon
    # l² (1/s̄ - 1) and l²/s̄: they differ by the square of the row norm, whatever ε.
    difference = paper.sigma(RELEASE) ** 2 - tight.sigma(RELEASE) ** 2
    assert difference == pytest.approx(RELEASE.row_norm**2, rel=1e-9)


def test_older_calibrations_are_private_too_and_need_more_noise() -> None:
    settings = {"epsilon": 1.0, "delta": DELTA}
    made = {
        name: RandomProjection.model_validate({**settings, "calibration": name})
        for name in ("tight", "paper", "sheffet", "mutual_information")
    }
    sigmas = [defense.sigma(RELEASE) for defense in made.values()]
    assert all(one < next_ for one, next_ in pairwise(sigmas))
    assert all(mechanism(defense).epsilon(DELTA, 1) <= 1 + 1e-9 for defense in made.values())
    # At ε = 0, δ is the total variation, which the mutual information bounds.
    least = mechanism(made["mutual_information"])
    assert least.epsilon(DELTA, 1) == 0.0


@pytest.mark.parametrize("known", [1.0, 0.3, 0.02])
def test_no_database_exceeds_the_bound_on_leverage(known: float) -> None:
    """Against random databases, and one that attains it."""
    draw = torch.Generator().manual_seed(0)
    sigma, norm = 0.8, RELEASE.row_norm
    most = bound(sigma, norm, known)
    for _ in range(200):
        rows = torch.randn(6, 3, generator=draw, dtype=torch.float64)
        rows[0] *= norm / rows[0].norm()
        gram = rows.T @ rows
        # Scale the other rows until the leverage is as small as is known.
        rest = gram - torch.outer(rows[0], rows[0])
        without = float(rows[0] @ torch.linalg.solve(rest, rows[0]))
        gram = torch.outer(rows[0], rows[0]) + rest * without * max(1 - known, 1e-9) / known
        assert float(rows[0] @ torch.linalg.solve(gram, rows[0])) <= known * (1 + 1e-9)
        smoothed = gram + sigma**2 * torch.eye(3, dtype=torch.float64)
        assert float(rows[0] @ torch.linalg.solve(smoothed, rows[0])) <= most * (1 + 1e-9)
    along = norm**2 / (norm**2 / known + sigma**2)  # rows along v alone
    assert along == pytest.approx(most, rel=1e-12)
    assert bound(lowering(most, norm, known), norm, known) == pytest.approx(most, rel=1e-9)


def test_what_is_known_of_the_leverage_saves_noise() -> None:
    """No noise where the inherent randomness is enough, and ever less on the way there."""
    allowed = float(projection.max_leverage(1.0, DELTA, RELEASE.columns))
    levels = [1.0, 0.5, 2 * allowed, allowed, allowed / 2]
    defenses = [RandomProjection(epsilon=1.0, delta=DELTA, leverage=level) for level in levels]
    sigmas = [defense.sigma(RELEASE) for defense in defenses]
    assert all(more > less for more, less in pairwise(sigmas[:4]))
    assert sigmas[3] == sigmas[4] == 0
    relations = [mechanism(defense).relation for defense in defenses]
    assert relations == ["add_or_remove"] + ["relative"] * 4
    epsilons = [mechanism(defense).epsilon(DELTA, 1) for defense in defenses]
    assert epsilons[:4] == pytest.approx([1.0] * 4, rel=1e-6)
    assert epsilons[4] < 1


def test_the_ledger_counts_every_release() -> None:
    defense = RandomProjection(epsilon=1.0, delta=DELTA)
    mechanism = defense.guarantee(RELEASE).mechanism
    assert isinstance(mechanism, ExactMechanism)
    keys = {"num_examples": 9, "delta": DELTA, "release": RELEASE}
    twice = claim(chain(defense), DECLARED, Entry(rounds=2, **keys))  # type: ignore[arg-type]
    assert twice.epsilon == mechanism.epsilon(DELTA, 2) > mechanism.epsilon(DELTA, 1)
    again = claim(chain(defense), DECLARED, Entry(rounds=0, repeated_rounds=1, repeats=3, **keys))  # type: ignore[arg-type]
    assert again.epsilon == mechanism.epsilon(DELTA, 3)


def test_shared_noise_counts_only_in_the_plain_mean_of_all() -> None:
    shared = RandomProjection(epsilon=1.0, delta=DELTA, shared_among=4)
    assert shared.sigma(RELEASE) == RandomProjection(epsilon=1.0, delta=DELTA).sigma(RELEASE) / 2
    alone, together = spent((shared,)), spent((shared, Aggregate()))
    assert together == pytest.approx(1.0, rel=1e-9) and alone > 1.5
    # A step between them makes the mean another one than what was proven.
    assert spent((shared, Clip(norm=1.0), Aggregate())) == alone
    assert spent((shared, GaussianNoise(std=1.0), Aggregate())) == alone
    assert chain(shared, Aggregate()).least_clients == 4
    assert chain(shared).least_clients == 1


def test_the_leverage_in_the_union_says_nothing_of_one_clients_rows() -> None:
    """Its own release is hidden by its share of the noise alone, whatever else it holds."""
    shared = RandomProjection(epsilon=1.0, delta=DELTA, shared_among=4, leverage=0.3)
    held = shared.guarantee(RELEASE)
    alone, together = held.mechanism, held.pooled
    assert isinstance(alone, ProjectionRelease) and isinstance(together, ProjectionRelease)
    assert (alone.relation, together.relation) == ("add_or_remove", "relative")
    assert alone.leverage == bound(shared.sigma(RELEASE), RELEASE.row_norm, 1.0)
    assert together.leverage == bound(2 * shared.sigma(RELEASE), RELEASE.row_norm, 0.3)


def test_it_protects_nothing_but_sketches() -> None:
    stack = chain(RandomProjection(epsilon=1.0, delta=DELTA))
    with pytest.raises(FedsimError, match="choose learner sketch"):
        stack.guarantees(DECLARED)
    with pytest.raises(FedsimError, match="defense least_squares"):
        stack.guarantees(DECLARED, replace(RELEASE, kind="normal_coefficients"))
    with pytest.raises(FedsimError, match="put it first"):
        chain(Clip(norm=1.0), RandomProjection(epsilon=1.0, delta=DELTA))
