"""What is drawn for an audit: true likelihood ratios, of what the full release is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest, multivariate_normal

from fedsim.privacy.contract import Experiment
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedExperiment
from fedsim.privacy.mechanisms.gaussian import GaussianExperiment
from fedsim.privacy.mechanisms.gaussian_sampling import GaussianSamplingExperiment
from fedsim.privacy.mechanisms.laplace import TruncatedLaplaceExperiment
from fedsim.privacy.mechanisms.least_squares import LeastSquaresExperiment
from fedsim.privacy.mechanisms.poisson_gaussian import PoissonGaussianExperiment
from fedsim.privacy.mechanisms.projection import RandomProjectionExperiment

Floats = NDArray[np.float64]


def correlated(sampling: str, **keys: Any) -> CorrelatedExperiment:
    given = {"steps": 4, "sampling_rate": 0.5, "correlation": 0.6, "noise_multiplier": 2.0}
    return CorrelatedExperiment.model_validate({**given, "sampling": sampling, **keys})


EXPERIMENTS: list[Experiment] = [
    GaussianExperiment(sensitivity=2.0, sigma=3.0),
    RandomProjectionExperiment(leverage=0.3, r=5),
    GaussianSamplingExperiment(k=20, distance=0.2),
    GaussianSamplingExperiment(k=20, beta=0.1, lift=1.0),
    LeastSquaresExperiment(p=0.1, q=0.25, r=30, d=4),
    LeastSquaresExperiment(p=0.0, q=0.2, r=30, d=1),
    PoissonGaussianExperiment(steps=5, sampling_rate=0.3, noise_multiplier=1.5),
    *(
        correlated(sampling)
        for sampling in ("full", "single_epoch", "poisson", "balls_in_bins", "fixed_size")
    ),
]


@pytest.mark.parametrize("sabotage", [1.0, 0.8])
@pytest.mark.parametrize("honest", EXPERIMENTS, ids=repr)
def test_the_score_is_the_likelihood_ratio_of_what_is_drawn(
    honest: Experiment, sabotage: float
) -> None:
    """E[exp(s)] = 1 without the row and E[exp(-s)] = 1 with it, only of s = ln(P / Q)."""
    experiment = honest.model_copy(update={"sabotage": sabotage})
    absent = experiment.scores(False, 200_000, np.random.default_rng(1))
    present = experiment.scores(True, 200_000, np.random.default_rng(2))
    for ratios in (np.exp(absent), np.exp(-present)):
        error = ratios.std() / math.sqrt(len(ratios))
        assert abs(ratios.mean() - 1) < 4 * error < 0.1
    assert present.mean() > 0 > absent.mean()


@pytest.mark.parametrize("sabotage", [1.0, 0.8])
def test_truncated_laplace_is_the_likelihood_ratio_where_both_can_be(sabotage: float) -> None:
    bound = math.log1p(math.expm1(1.0) / (2 * 0.05))  # where δ is 0.05
    experiment = TruncatedLaplaceExperiment(scale=1.0, bound=bound, sabotage=sabotage)
    absent = experiment.scores(False, 400_000, np.random.default_rng(1))
    present = experiment.scores(True, 400_000, np.random.default_rng(2))
    assert np.isneginf(absent).any() and not np.isposinf(absent).any()
    assert np.isposinf(present).any() and not np.isneginf(present).any()
    seen = np.exp(absent).mean() + np.isposinf(present).mean()
    assert seen == pytest.approx(1, abs=0.01)
    assert np.abs(absent[np.isfinite(absent)]).max() <= 1 / sabotage + 1e-9
    if sabotage == 1:
        assert np.isposinf(present).mean() == pytest.approx(0.05, abs=2e-3)


@pytest.mark.parametrize("honest", EXPERIMENTS, ids=repr)
def test_less_noise_is_told_apart_more_easily(honest: Experiment) -> None:
    def divergence(sabotage: float) -> float:
        experiment = honest.model_copy(update={"sabotage": sabotage})
        return float(experiment.scores(True, 100_000, np.random.default_rng(3)).mean())

    assert divergence(0.5) > 1.3 * divergence(1.0)


def test_the_projection_of_a_whole_matrix_has_the_score_that_is_drawn() -> None:
    """D'G of a regularized database, drawn in full, and the ratio of its two normal densities."""
    rng = np.random.default_rng(4)
    rows, r, sigma = rng.normal(size=(6, 3)), 4, 1.2
    row = np.array([1.0, -0.5, 2.0])
    without = rows.T @ rows + sigma**2 * np.eye(3)
    whole = without + np.outer(row, row)
    leverage = float(row @ np.linalg.solve(whole, row))
    appended = np.vstack([rows, sigma * np.eye(3), row])
    for present in (True, False):
        used = appended if present else appended[:-1]
        released = np.einsum("nd,knr->kdr", used, rng.normal(size=(2000, len(used), r)))
        ratios = sum(
            multivariate_normal(cov=whole).logpdf(released[:, :, j])
            - multivariate_normal(cov=without).logpdf(released[:, :, j])
            for j in range(r)
        )
        along = np.linalg.solve(whole, row) @ released
        squares = (along**2).sum(1)
        score = squares / (2 * (1 - leverage)) + r / 2 * math.log1p(-leverage)
        np.testing.assert_allclose(score, ratios, rtol=1e-8, atol=1e-10)
        drawn = RandomProjectionExperiment(leverage=leverage, r=r).scores(
            present, 100_000, np.random.default_rng(5)
        )
        assert kstest(ratios, drawn).pvalue > 1e-3


def test_least_squares_of_a_whole_matrix_has_the_score_that_is_drawn() -> None:
    rng = np.random.default_rng(6)
    rows, d, r = rng.normal(size=(12, 4)), 3, 20

    def law(data: Floats) -> tuple[Floats, Floats]:
        """Mean and covariance of the release of [B, b]."""
        b, y = data[:, :d], data[:, d]
        solution = np.linalg.solve(b.T @ b, b.T @ y)
        residual = float(((y - b @ solution) ** 2).sum())
        return solution, residual * np.linalg.inv(b.T @ b) / r

    def leverage(data: Floats) -> float:
        return float(data[-1] @ np.linalg.solve(data.T @ data, data[-1]))

    laws = [multivariate_normal(*law(data)) for data in (rows[:-1], rows)]
    p, q = leverage(rows[:, :d]), leverage(rows)
    experiment = LeastSquaresExperiment(p=p, q=q, r=r, d=d)
    for present in (False, True):
        released = laws[present].rvs(2000, random_state=np.random.default_rng(7))
        ratios = laws[1].logpdf(released) - laws[0].logpdf(released)
        drawn = experiment.scores(present, 100_000, np.random.default_rng(8))
        assert kstest(ratios, drawn).pvalue > 1e-3


def test_sabotage_of_the_regularization_is_a_higher_leverage() -> None:
    """A row alone against σ I has leverage l² / (l² + σ²); 20% less σ makes it this much higher."""
    row, sigma = np.array([0.6, 0.8]), 2.0
    whole = np.outer(row, row) + (0.8 * sigma) ** 2 * np.eye(2)
    expected = float(row @ np.linalg.solve(whole, row))
    declared = 1 / (1 + sigma**2)
    honest = RandomProjectionExperiment(leverage=expected, r=3)
    lying = RandomProjectionExperiment(leverage=declared, r=3, sabotage=0.8)
    for present in (False, True):
        np.testing.assert_allclose(
            lying.scores(present, 100, np.random.default_rng(9)),
            honest.scores(present, 100, np.random.default_rng(9)),
        )


def test_correlation_is_undone_by_the_attacker() -> None:
    """Whitened, the steps' noise is independent again: the score's spread is ||C 1|| / σ."""
    reach = math.sqrt(sum(((1 - 0.6**t) / 0.4) ** 2 for t in range(1, 5)))
    scores = correlated("full").scores(True, 400_000, np.random.default_rng(10))
    assert scores.std() == pytest.approx(reach / 2, rel=0.01)
    assert scores.mean() == pytest.approx((reach / 2) ** 2 / 2, rel=0.02)
    once = correlated("single_epoch").scores(True, 400_000, np.random.default_rng(10))
    first = math.sqrt(sum(0.36**t for t in range(4)))
    assert once.std() == pytest.approx(first / 2, rel=0.01)


def test_poisson_without_correlation_is_the_steps_sum() -> None:
    keys = {"steps": 5, "sampling_rate": 0.3, "noise_multiplier": 1.5}
    whole = CorrelatedExperiment.model_validate({**keys, "sampling": "poisson"})
    single = PoissonGaussianExperiment.model_validate(keys)
    drawn = [
        e.scores(True, 100_000, np.random.default_rng(s)) for s, e in enumerate((whole, single))
    ]
    assert kstest(*drawn).pvalue > 1e-3


def test_too_many_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 10 steps"):
        correlated("poisson", steps=11)
    correlated("balls_in_bins", steps=40)
