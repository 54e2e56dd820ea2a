"""What an attacker tells of one row's presence stays within the proven bound, and reaches it.

The worst case that a mechanism allows is attacked, by the attack of a real run on releases of the
learner of a real run: the bound has to hold of it, and a mechanism with a fifth less noise has to
break it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from slow_cases import slow_but

from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.guarantee import Release
from fedsim.learners.closed_form import regularize, sketch
from fedsim.learners.least_squares import normal_solution
from fedsim.privacy.membership import auc_limit, tpr_limit
from fedsim.targets.membership import membership_auc
from fedsim.testing import make_release
from fedsim.types import Observation, RowTruth
from fedsim_attacks.closed_form._release_likelihood import release_likelihood
from fedsim_attacks.closed_form.membership_inference import MembershipInference
from fedsim_defenses.least_squares import LeastSquaresMechanism
from fedsim_defenses.random_projection import RandomProjection

EPSILON, DELTA, COLUMNS, BOUND = 1.0, 0.05, 20, 1.5
DRAWS = 4000
NOBODY = torch.zeros(0, 3, dtype=torch.float64)
ROW = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64)  # as long as the bound allows


def release(kind: str) -> tuple[Observation, float]:
    """(an observation that declares the mechanism, its σ)."""
    rows = torch.stack([ROW, -ROW / 2, ROW / 3])
    sketched = kind == "sketch"
    observation, _ = make_release(
        rows,
        torch.ones(3, dtype=torch.bool),
        learner="sketch" if sketched else "least_squares",
        parameters={"columns": COLUMNS} if sketched else {"method": "ls", "columns": COLUMNS},
        defense=[
            {
                "name": "random_projection" if sketched else "least_squares",
                "epsilon": EPSILON,
                "delta": DELTA,
            }
        ],
        row_norm=BOUND,
        intercept=False,
    )
    return observation, observation.release.sigma


@functools.cache
def drawn(kind: str, weaker: float, present: bool) -> torch.Tensor:
    """`scores` of `DRAWS` releases with `weaker` times the noise that the claim needs."""
    observation, sigma = release(kind)
    seen = replace(observation, spec=replace(observation.release, sigma=weaker * sigma))
    return scores(seen, NOBODY, present, weaker * sigma, DRAWS)


def scores(
    observation: Observation, others: torch.Tensor, present: bool, sigma: float, draws: int
) -> torch.Tensor:
    """Of `ROW`, by the attack's likelihood ratio, on as many releases with or without it."""
    rows = torch.cat([others, ROW[None]]) if present else others
    whole = regularize(rows, sigma)
    stream = torch.Generator().manual_seed(int(present))
    knowledge = Knowledge(grant=Grant.least(rows="others"), other_rows=(others,), candidate=ROW)
    worlds = torch.stack([torch.zeros_like(ROW), ROW])
    known = release_likelihood(observation, knowledge)
    found = []
    for _ in range(draws):
        if observation.release.kind == "sketch":
            value = sketch(whole, COLUMNS, stream)
        else:
            value = normal_solution(whole, COLUMNS, stream)
        absent, there = replace(known, observed=value).log_likelihood(worlds)
        found.append(there - absent)
    return torch.stack(found)


def test_the_attack_answers_that_ratio() -> None:
    observation, _ = release("sketch")
    known = Knowledge(grant=Grant.least(rows="others"), other_rows=(NOBODY,), candidate=ROW)
    found = solve(MembershipInference(), observation, known, 0).reconstruction.membership
    worlds = torch.stack([torch.zeros_like(ROW), ROW])
    absent, there = release_likelihood(observation, known).log_likelihood(worlds)
    assert found is not None and float(found) == float(there - absent)


@pytest.mark.parametrize("kind", slow_but(["sketch"], ["sketch", "coefficients"]))
def test_the_worst_case_is_within_the_bound(kind: str) -> None:
    """At every threshold and in both directions, up to five standard deviations of the draws."""
    inside, outside = (drawn(kind, 1.0, world) for world in (True, False))
    for one, other, sign in ((inside, outside, 1), (outside, inside, -1)):
        for threshold in np.quantile(torch.cat([one, other]).numpy(), np.linspace(0.01, 0.99, 99)):
            tpr = float((sign * one > sign * threshold).double().mean())
            fpr = float((sign * other > sign * threshold).double().mean())
            slack = 5 * math.sqrt((tpr * (1 - tpr) + math.e**2 * fpr * (1 - fpr)) / DRAWS)
            assert tpr <= math.exp(EPSILON) * fpr + DELTA + slack
    truth = torch.arange(2 * DRAWS) < DRAWS
    area = membership_auc(torch.cat([inside, outside]), truth)
    assert area <= auc_limit(EPSILON, DELTA) + 5 * 0.5 / math.sqrt(DRAWS)
    assert area > 0.6


def test_of_a_sketch_the_bound_is_reached_and_less_noise_breaks_it() -> None:
    """The tight calibration is tight: at the threshold ε the excess over e^ε FPR is δ itself."""

    def excess(weaker: float) -> tuple[float, float]:
        tpr, fpr = (
            float((drawn("sketch", weaker, world) > EPSILON).double().mean())
            for world in (True, False)
        )
        spread = math.sqrt((tpr * (1 - tpr) + math.e**2 * fpr * (1 - fpr)) / DRAWS)
        return tpr - math.exp(EPSILON) * fpr, spread

    found, spread = excess(1.0)
    assert found == pytest.approx(DELTA, abs=5 * spread)
    broken, spread = excess(0.8)
    assert broken > DELTA + 3 * spread


def test_without_defense_a_few_columns_tell_members_apart() -> None:
    """Ten rows, twenty columns."""
    observation, _ = release("sketch")
    bare = replace(observation, spec=replace(observation.release, sigma=0.0), defense=())
    stream = torch.Generator().manual_seed(5)
    others = torch.rand(9, 3, generator=stream, dtype=torch.float64) - 0.5
    inside, outside = (scores(bare, others, world, 0.0, 300) for world in (True, False))
    truth = torch.arange(600) < 300
    assert membership_auc(torch.cat([inside, outside]), truth) > 0.95


@pytest.mark.parametrize("calibration", ["tight", "paper"])
def test_the_declared_noise_is_what_the_mechanism_adds(calibration: str) -> None:
    """An attacker that were told another σ would be too weak, and no test would say so."""
    mechanism = RandomProjection(epsilon=1.0, delta=0.01, calibration=calibration)  # type: ignore[arg-type]
    rows = torch.eye(3, dtype=torch.float64)
    observation, _ = make_release(
        rows,
        torch.ones(3, dtype=torch.bool),
        parameters={"columns": 9},
        defense=[{"name": "random_projection", **mechanism.model_dump()}],
        row_norm=1.0,
    )
    protected = Release(kind="sketch", row_norm=1.0, columns=9, features=2)
    assert observation.release.sigma == mechanism.sigma(protected)
    regression = LeastSquaresMechanism(epsilon=1.0, delta=0.01)
    observation, _ = make_release(
        torch.rand(9, 3, dtype=torch.float64),
        torch.ones(9, dtype=torch.bool),
        learner="least_squares",
        parameters={"method": "als", "columns": 9},
        defense=[{"name": "least_squares", **regression.model_dump()}],
        row_norm=2.0,
    )
    protected = Release(kind="sketched_coefficients", row_norm=2.0, columns=9, features=2)
    assert observation.release.sigma == regression.sigma(protected)


def test_limits_of_what_a_claim_allows() -> None:
    """No privacy allows all, perfect privacy a coin; the curve is concave and its area is known."""
    assert auc_limit(0.0, 0.0) == 0.5 and auc_limit(math.inf, 0.0) == 1.0
    assert auc_limit(3.0, 1.0) == 1.0 and tpr_limit(1000.0, 0.0, 1e-3) == 1.0
    grid = np.linspace(0, 1, 20_001)
    for epsilon, delta in ((0.0, 0.2), (1.0, 0.0), (1.0, 0.05), (4.0, 1e-3)):
        curve = np.array([tpr_limit(epsilon, delta, x) for x in grid])
        assert np.trapezoid(curve, grid) == pytest.approx(auc_limit(epsilon, delta), abs=1e-6)
        assert (np.diff(curve, 2) < 1e-12).all() and curve[-1] == 1
    # Randomized response attains it: it lies with probability 1 / (1 + e^ε).
    assert tpr_limit(1.0, 0.0, 1 / (1 + math.e)) == pytest.approx(math.e / (1 + math.e))


def test_poisson_sampling_keeps_the_worlds_apart_in_one_row_only() -> None:
    """Of a probe each row takes part by its own coin: the number of the others does not tell."""
    from fedsim.scenario.resolve import resolve
    from fedsim.training.schedule import Probe
    from fedsim.training.workload import Workload

    wanted = resolve(
        {
            "name": "coins",
            "data": {"source": "diabetes", "clients": 1},
            "learner": {"name": "sketch", "columns": 5},
            "training": {"rounds": 1},
            "attacks": ["membership_inference"],
            "knowledge": {"rows": "others"},
            "observe": {"batch_sizes": [88], "trials": 200},
        }
    )
    here = Workload(wanted, "none")
    size = len(here.parts[0])
    counts, there = [], []
    for trial in range(200):
        probe = Probe(batch_size=88, trial=trial)
        truth = here.client_update(0, 1, *here.initial(), {}, probe=probe).truth
        assert isinstance(truth, RowTruth)
        others = int(truth.members.sum()) - int(truth.members[0])
        counts.append(others)
        there.append(bool(truth.members[0]))
    chance = 88 / size
    low, high = binom.ppf([1e-4, 1 - 1e-4], 200 * (size - 1), chance)
    assert low < sum(counts) < high
    low, high = binom.ppf([1e-4, 1 - 1e-4], 200, chance)
    assert low < sum(there) < high
    # The spread of independent coins, not of a fixed number.
    assert np.var(counts) == pytest.approx((size - 1) * chance * (1 - chance), rel=0.5)
    assert abs(np.corrcoef(counts, there)[0, 1]) < 0.3
