"""Whatever the noise, the rounds, δ and the sampling: an answer, in bounded work, never too low."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from fedsim.contracts.stack import Stack
from fedsim.privacy import calculator, ledger
from fedsim.privacy.baselines import kan_noise, sheffet_sigma
from fedsim.privacy.composition import correlated
from fedsim.privacy.composition.correlated import reach
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian, work
from fedsim.privacy.recovery import (
    chance_within,
    gaussian_information,
    tensor_bound,
    tensor_rate,
)
from fedsim.scenario.build import build_stack
from fedsim.scenario.model import PluginRef
from fedsim.types import FedsimError, LocalTraining, PrivacyClaim, Sampling

NOISES = (1e-300, 1e-9, 1e-6, 0.01, 1.0, 1e6, 1e9, 1e12)
DELTAS = (1e-300, 1e-5, 1 - 1e-9)
slow = partial(pytest.param, marks=pytest.mark.slow)


def stack(*members: tuple[str, dict[str, object]]) -> Stack:
    return build_stack([PluginRef(name=name, parameters=given) for name, given in members])


def claimed(
    of: Stack, rounds: int, held: int, delta: float, sampling: Sampling = "without_replacement"
) -> PrivacyClaim:
    training = LocalTraining(
        algorithm="fedsgd", steps=1, batch_size=4, lr=0.1, mode="eval", sampling=sampling
    )
    return claim(of, training, Entry(rounds=rounds, num_examples=held, delta=delta))


def shown(epsilon: float, noise: float, rounds: int, rate: float, exchanged: bool) -> float:
    """A lower bound of δ: the best threshold on the sum of all releases of independent noise."""
    counts = np.unique(binom.ppf([1e-12, 0.01, 0.5, 0.99, 1 - 1e-12], rounds, rate))
    counts = np.unique(np.append(counts, np.arange(min(rounds, 20) + 1)))
    weights = np.diff(binom.cdf(counts, rounds, rate), prepend=0.0)  # fewer participations, at most
    std = noise * math.sqrt(rounds)
    cuts = np.concatenate([counts + std * x for x in np.linspace(-8, 8, 33)])[:, None]
    low = np.concatenate([[0.0], counts[:-1] + 1]) if len(counts) > 1 else counts
    likely = (weights * norm.sf((cuts - low) / std)).sum(1)
    other = (weights * norm.sf((cuts + low) / std)).sum(1) if exchanged else None
    log_other = np.log(np.maximum(other, 1e-320)) if exchanged else norm.logsf(cuts[:, 0] / std)
    return float((likely - np.exp(np.minimum(epsilon + log_other, 700.0))).max())


@contextmanager
def counted() -> Iterator[list[int]]:
    numbers: list[int] = [0]

    def listen(done: int, total: int) -> None:
        numbers[0] = max(numbers[0], total)

    with work.heard_by(listen):
        yield numbers


@pytest.mark.parametrize("noise", [*NOISES[:6], *map(slow, NOISES[6:])])
@pytest.mark.parametrize("sampling", ["without_replacement", slow("poisson")])
def test_dp_sgd_claims_what_holds(noise: float, sampling: Sampling) -> None:
    dp = stack(("dp_sgd", {"norm": 1.0, "noise_multiplier": noise}))
    for rounds in (1, 1000, 100_000, 10**9):
        for held in (4, 400, 10**6):
            for delta in DELTAS:
                found = claimed(dp, rounds, held, delta, sampling).epsilon
                assert found >= 0
                if math.isinf(found) or rounds > 100_000:
                    continue
                exchanged = sampling == "without_replacement"
                least = shown(found, noise, rounds, 4 / held, exchanged)
                assert least <= delta * (1 + 1e-6) + 1e-12, (rounds, held, delta, found)


@pytest.mark.parametrize("noise", NOISES)
def test_noise_on_updates_is_the_closed_form(noise: float) -> None:
    for rounds in (1, 100_000):
        for delta in DELTAS:
            clip = ("clip", {"norm": 1.0})
            of_client = stack(clip, ("gaussian_noise", {"multiplier": noise}))
            found = claimed(of_client, rounds, 400, delta).epsilon
            exact = float(gaussian.epsilon(noise / math.sqrt(rounds), delta))
            assert found == pytest.approx(exact) if exact < 1e9 else math.isinf(found)
            of_server = stack(clip, ("dp_ftrl", {"noise_multiplier": noise, "correlation": 0.0}))
            if rounds == 1:
                assert claimed(of_server, rounds, 400, delta).epsilon == pytest.approx(found)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("correlation", [0.5, 1 - 1e-12])
def test_correlated_noise_claims_what_holds(noise: float, correlation: float) -> None:
    of = {"norm": 1.0, "noise_multiplier": noise, "correlation": correlation}
    for rounds in (1, 10**9) if correlation > 0.9 else (1, 30, 10**9):
        for delta in DELTAS[:2]:
            for held in (4, 10**6):
                with counted() as numbers:
                    found = claimed(stack(("correlated_noise", of)), rounds, held, delta).epsilon
                assert numbers[0] <= work.MOST
                if math.isfinite(found):
                    # The first step has the noise of no step before it.
                    least = shown(found, noise, 1, 4 / held, exchanged=True)
                    assert least <= delta * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("sampling", ["poisson", "balls_in_bins"])
@pytest.mark.parametrize("noise", [1e-300, slow(1e-6), 0.01])
def test_little_noise_is_not_drawn_for(sampling: Sampling, noise: float) -> None:
    of = {"norm": 1.0, "noise_multiplier": noise, "correlation": 0.9}
    with counted() as numbers:
        found = claimed(stack(("correlated_noise", of)), 200, 400, 1e-5, sampling)
    assert found.epsilon > 1e3 and numbers[0] <= 1e6


def test_long_runs_are_bounded_and_not_drawn_for() -> None:
    of = {"norm": 1.0, "noise_multiplier": 1.0, "correlation": 0.9}
    with counted() as numbers:
        found = claimed(stack(("correlated_noise", of)), 50_000, 400, 1e-5, "poisson")
    assert math.isfinite(found.epsilon) and "may be known" in (found.accountant or "")
    assert numbers[0] == 0


def test_counting_participations_bounds_their_norms() -> None:
    given = (60, 0.1, 0.7)
    shape = dict(zip(("steps", "sampling_rate", "correlation"), given, strict=True))
    norms, weights, rest = correlated._norms_by_count(*given)
    assert sum(weights) + rest == pytest.approx(1.0)
    for noise in (0.5, 3.0):
        exact = correlated.log_delta_revealed(noise, 1.0, **shape)  # type: ignore[arg-type]
        held = norms > 0
        bound = correlated._log_mean_delta(noise, 1.0, norms[held], weights[held], rest)
        assert exact <= bound <= 0


@pytest.mark.parametrize("noise", [1e-6, 0.01, slow(0.3), 4.0, 1e6, 1e12])
@pytest.mark.parametrize("rate", [1e-9, 0.01, slow(1 - 1e-9)])
def test_poisson_lies_between_a_threshold_and_no_sampling(noise: float, rate: float) -> None:
    for steps in (1, 300):
        keys = {"steps": steps, "sampling": "poisson", "sampling_rate": rate}
        for delta in (1e-30, 1e-5, 0.5):
            found = calculator.epsilon(
                "correlated_gaussian", {**keys, "noise_multiplier": noise}, delta=delta
            ).epsilon
            exact = float(gaussian.epsilon(noise / math.sqrt(steps), delta))
            assert found <= exact * (1 + 1e-9) + 1e-9 or found == math.inf
            if math.isfinite(found):
                assert shown(found, noise, steps, rate, exchanged=False) <= delta * 1.000001 + 1e-12


def test_what_takes_too_long_is_refused_with_a_remedy() -> None:
    keys = {
        "steps": 100_000,
        "sampling": "poisson",
        "sampling_rate": 0.01,
        "correlation": 0.999999,
        "noise_multiplier": 1.0,
    }
    with pytest.raises(FedsimError, match="are computed; use fewer steps"):
        calculator.epsilon("correlated_gaussian", keys, delta=1e-5)


@pytest.mark.parametrize("noise", [0.02, 1.0, slow(1e3), 1e5, slow(1e7), slow(1e9), slow(1e12)])
@pytest.mark.parametrize("size", [slow(1), 40, slow(399)])
def test_divergences_are_no_less_than_that_of_the_mean_shift(noise: float, size: int) -> None:
    """Sampled batches differ in the mean by q; the whole data's divergence is the most."""
    orders, found = ledger._renyi(noise, size, 400)
    most = np.array(orders) / (2 * noise**2)
    least = most * (size / 400) ** 2 * (1 - 1e-6) if noise >= 1e3 else 0 * most
    beyond = noise > ledger._AMPLIFIED[1]
    assert (np.array(found) >= least).all()
    assert beyond or (np.array(found) <= most * (1 + 1e-12)).all()
    assert (np.array(found) > 0).all()


RATE = {"width": 9, "dimension": 2, "images": 1, "classes": 2}
KAN = {"epsilon": 1.0, "delta": 1e-5, "steps": 370, "sampling_rate": 0.1, "correlation": 0.5}
SHEFFET = {"row_norm": 1.0, "r": 3, "epsilon": 1.0, "delta": 1e-5}
WITHIN = {"error": 0.5, "information": 1.0, "dimension": 5}


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (kan_noise, KAN, {"delta": 1.5, "sampling_rate": 0.0, "correlation": 1.0, "steps": 0}),
        (sheffet_sigma, SHEFFET, {"epsilon": 0.0, "delta": 0.0, "row_norm": math.nan, "r": -1}),
        (tensor_rate, RATE, {"width": 0, "kept": 0.0, "dimension": -1, "noise": math.nan}),
        (tensor_bound, {**RATE, "rate": 0.1}, {"independence": 0.0, "rate": math.nan}),
        (gaussian_information, {"energy": 1.0, "std": 1.0}, {"std": 0.0, "energy": -1.0}),
        (chance_within, WITHIN, {"error": 1.5, "information": math.nan, "dimension": 1}),
        (reach, {"schedules": [(True,)], "correlation": 0.5}, {"schedules": []}),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(
    function: Any, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    function(**right)
    for name, value in wrong.items():
        with pytest.raises(FedsimError, match=f"^{name}: "):
            function(**{**right, name: value})


def test_anything_is_within_a_sine_of_one() -> None:
    assert chance_within(1.0, 1.0, 5) == 1.0
