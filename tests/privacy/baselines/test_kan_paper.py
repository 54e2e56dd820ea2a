"""Errors of the KAN paper's privacy analysis, each demonstrated.

Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD with Correlated Noise, 2026.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.stats import beta, norm

from fedsim.privacy import baselines
from fedsim.privacy.composition import correlated
from fedsim.privacy.contract import Answer
from fedsim.privacy.dp_sgd import _DPSGDCurve
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError

RATE, SIGMA, EPSILON = 0.1, 1.0, 1.0


def hockey_stick(here: dict[float, float], there: dict[float, float]) -> float:
    """δ(1) between two mixtures of N(mean, 1), written as {mean: weight}, by quadrature."""
    x = np.linspace(-12, 15, 400_001)
    first, second = (
        sum(weight * norm.pdf(x - mean) for mean, weight in mixture.items())
        for mixture in (here, there)
    )
    excess = np.maximum(first - math.exp(EPSILON) * second, 0)
    return float(excess.sum() * (x[1] - x[0]))


def test_f8_claims_too_little_for_batches_of_a_fixed_size() -> None:
    """Theorem F.8 drops the other examples' gradients: their sum depends on who was drawn."""
    claimed = hockey_stick({0.0: 1 - RATE, 1.0: RATE}, {0.0: 1.0})
    # one step, batches of one: every other gradient is -1, the example's is +1, or 0 if zeroed out
    true = hockey_stick({-1.0: 1 - RATE, 1.0: RATE}, {-1.0: 1 - RATE, 0.0: RATE})
    assert claimed == pytest.approx(2.07e-4, rel=0.01)
    assert true >= 7.7e-3
    assert true > 37 * claimed


def test_f8_is_refuted_by_running_the_algorithm() -> None:
    """Ten examples, batches of one, one step: the event x > 1.6 alone exceeds the claim."""
    draw, runs = np.random.default_rng(0), 400_000

    def released(gradient_of_the_first: float) -> np.ndarray:
        gradients = np.full(10, -1.0)
        gradients[0] = gradient_of_the_first
        batch = draw.integers(10, size=runs)
        return gradients[batch] + SIGMA * draw.standard_normal(runs)

    hits = [int((released(gradient) > 1.6).sum()) for gradient in (1.0, 0.0)]
    surely = 0.0005  # each side, Clopper-Pearson
    least = beta.ppf(surely, hits[0], runs - hits[0] + 1)
    most = beta.ppf(1 - surely, hits[1] + 1, runs - hits[1])
    assert least - math.exp(EPSILON) * most > 10 * 2.1e-4


def test_f8_is_right_for_poisson_sampling() -> None:
    keys = {"steps": 1, "sampling_rate": RATE, "noise_multiplier": SIGMA, "sampling": "poisson"}
    claimed = CorrelatedCurve.model_validate(keys).delta(EPSILON).delta
    exact = hockey_stick({0.0: 1 - RATE, 1.0: RATE}, {0.0: 1.0})
    assert claimed == pytest.approx(exact, rel=0.02)
    # whatever the others add, it is added to both neighbours
    shifted = hockey_stick(
        {-2.0: 0.5 * (1 - RATE), -1.0: 0.5, 0.0: 0.5 * RATE}, {-2.0: 0.5, -1.0: 0.5}
    )
    assert shifted <= exact


def test_f12_speaks_of_long_runs_only() -> None:
    """η <= 1 needs T q >= 3 log(2 / δ): 36.6 expected participations at δ = 1e-5."""
    with pytest.raises(FedsimError, match=r"36\.6.*exact"):
        baselines.kan_noise(1.0, 1e-5, steps=360, sampling_rate=0.1, correlation=0.5)
    baselines.kan_noise(1.0, 1e-5, steps=370, sampling_rate=0.1, correlation=0.5)
    assert baselines.kan_least_delta(370, 0.1) < 1e-5 < baselines.kan_least_delta(360, 0.1)
    keys = {"steps": 100, "sampling_rate": 0.1, "correlation": 0.5, "sampling": "fixed_size"}
    curve = CorrelatedCurve.model_validate({**keys, "variant": "paper", "noise_multiplier": 50.0})
    with pytest.raises(FedsimError, match=r"F\.12"):
        curve.epsilon(1e-5)
    assert curve.epsilon(0.1).delta == 0.1
    with pytest.raises(FedsimError, match="ε > 0"):
        curve.delta(0.0)


def test_f12_rests_on_a_gaussian_step_that_fails_above_one() -> None:
    epsilon, delta = 10.0, 1e-2
    classical = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    assert math.exp(gaussian.log_delta(classical, epsilon)) > 4 * delta


@pytest.mark.parametrize("noise", [1.0, 3.0, 12.0, 60.0])
def test_what_its_variant_states_is_proven_at_every_epsilon(noise: float) -> None:
    """Whoever knows the batches is bounded by the mean over them, which needs no theorem."""
    shape = {"steps": 1000, "sampling_rate": 0.1, "correlation": 0.0}
    keys = {**shape, "sampling": "fixed_size", "noise_multiplier": noise}
    paper = CorrelatedCurve.model_validate({**keys, "variant": "paper"}).epsilon(1e-5).epsilon
    assert paper >= CorrelatedCurve.model_validate(keys).epsilon(1e-5).epsilon
    asked = baselines.kan_noise(paper, 1e-5, **shape)
    assert asked == pytest.approx(noise, rel=1e-6)
    # its own last step, where it is proven
    slack = math.sqrt(3 * math.log(2e5) / 100)
    own = math.sqrt((1 + slack) * 100) * math.sqrt(2 * math.log(2.5e5)) / noise
    assert paper >= own
    if own <= 1:
        assert paper == pytest.approx(own)


def test_f12_counts_correlation_as_if_all_participations_were_in_a_row() -> None:
    """1 / (1 - λ) against 1 / sqrt(1 - λ²) for participations far apart."""
    shape = {"steps": 400, "sampling_rate": 0.1}
    lam = 0.9
    paper = baselines.kan_noise(1.0, 1e-3, **shape, correlation=lam) / baselines.kan_noise(
        1.0, 1e-3, **shape, correlation=0.0
    )
    apart = correlated.sensitivity(400, lam, 1) / correlated.sensitivity(400, 0.0, 1)
    assert paper == pytest.approx(10)
    assert apart == pytest.approx(1 / math.sqrt(1 - lam**2))


def test_theorems_5_4_and_5_1_do_not_join_as_correlation_vanishes() -> None:
    """λ -> 0 must end at λ = 0; theirs is off by a factor that grows like 1 / sqrt(q)."""

    def jump(rate: float) -> float:
        steps = round(100 / rate)  # as many participations
        shape = {"steps": steps, "sampling_rate": rate}
        vanishing = baselines.kan_noise(0.5, 1e-5, **shape, correlation=1e-12)
        order = 1 + 2 * math.log(1e5) / 0.5
        independent = rate * math.sqrt(16 * steps * order / 0.5)
        found = baselines.kan_independent_epsilon(independent, 1e-5, **shape)
        assert found == pytest.approx(0.5)
        return vanishing / independent

    assert jump(0.01) > 3
    assert jump(0.0001) / jump(0.01) == pytest.approx(10)


def test_theorem_5_4_is_false_of_short_runs() -> None:
    """A single step: one example in a hundred is seen behind the noise that it asks for."""
    rate, delta = 0.01, 1e-5
    noise = rate * math.sqrt(16 * (1 + 2 * math.log(1 / delta)))
    shape = {"steps": 1, "sampling_rate": rate}
    claimed = baselines.kan_independent_epsilon(noise, delta, **shape)
    assert claimed == pytest.approx(EPSILON)
    # batches of one; all other gradients are 0, the example's is +1 or, replaced, -1
    present, replaced = ({0.0: 1 - rate, place / noise: rate} for place in (1.0, -1.0))
    assert hockey_stick(present, replaced) > 900 * delta


def test_its_variant_states_no_less_than_the_ledger_proves() -> None:
    def stated(variant: str, rounds: int, batch_size: int, noise: float) -> Answer:
        keys = {"examples": 10_000, "rounds": rounds, "batch_size": batch_size, "variant": variant}
        return _DPSGDCurve.model_validate({**keys, "noise_multiplier": noise}).epsilon(1e-5)

    long, short = ((1000, 100, 8.0), (1, 100, 0.2))
    assert stated("paper", *long).method == baselines.KAN_INDEPENDENT_METHOD
    assert stated("paper", *long).epsilon > stated("exact", *long).epsilon
    assert stated("paper", *short).epsilon == stated("exact", *short).epsilon > 2
    with pytest.raises(ValidationError, match="without_replacement"):
        _DPSGDCurve.model_validate(
            {
                "examples": 100,
                "rounds": 1,
                "batch_size": 10,
                "noise_multiplier": 1,
                "sampling": "poisson",
                "variant": "paper",
            }
        )
