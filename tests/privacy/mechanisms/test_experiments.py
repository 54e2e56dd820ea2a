"""What is drawn for an audit: true likelihood ratios, of what the full release is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest, multivariate_normal

from fedsim.privacy import calculator
from fedsim.privacy.contract import Experiment

Floats = NDArray[np.float64]


def make(mechanism: str, **keys: Any) -> Experiment:
    made = calculator.make(mechanism, "experiment", keys)
    assert isinstance(made, Experiment)
    return made


STEPS = {"steps": 4, "sampling_rate": 0.5, "correlation": 0.6, "noise_multiplier": 2.0}
EXPERIMENTS = [
    make("gaussian", sensitivity=2.0, sigma=3.0),
    make("random_projection", leverage=0.3, r=5),
    make("gaussian_sampling", k=20, distance=0.2),
    make("gaussian_sampling", k=20, beta=0.1, lift=1.0),
    make("least_squares", p=0.1, q=0.25, r=30, d=4),
    make("least_squares", p=0.0, q=0.2, r=30, d=1),
    make("poisson_gaussian", steps=5, sampling_rate=0.3, noise_multiplier=1.5),
    *(
        make("correlated_gaussian", **STEPS, sampling=sampling)
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
    experiment = make("truncated_laplace", scale=1.0, bound=bound, sabotage=sabotage)
    absent = experiment.scores(False, 400_000, np.random.default_rng(1))
    present = experiment.scores(True, 400_000, np.random.default_rng(2))
    assert np.isneginf(absent).any() and not np.isposinf(absent).any()
    assert np.isposinf(present).any() and not np.isneginf(present).any()
    seen = np.exp(absent).mean() + np.isposinf(present).mean()
    assert seen == pytest.approx(1, abs=0.01)
    assert np.abs(absent[np.isfinite(absent)]).max() <= 1 / sabotage + 1e-9
    if sabotage == 1:
        assert np.isposinf(present).mean() == pytest.approx(0.05, abs=2e-3)


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
    experiment = make("least_squares", p=p, q=q, r=r, d=d)
    for present in (False, True):
        released = laws[present].rvs(2000, random_state=np.random.default_rng(7))
        ratios = laws[1].logpdf(released) - laws[0].logpdf(released)
        drawn = experiment.scores(present, 100_000, np.random.default_rng(8))
        assert kstest(ratios, drawn).pvalue > 1e-3
