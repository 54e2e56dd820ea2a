"""The ledger: which stacks it knows, composition, relations, sampling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from fedsim.contracts.stack import Stack, chain
from fedsim.privacy import ledger
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError, LocalTraining, PrivacyClaim
from fedsim_defenses.aggregate import Aggregate
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.dropout import Dropout
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.gradient_pruning import GradientPruning
from fedsim_defenses.local_aggregation import LocalAggregation
from fedsim_defenses.quantization import Quantization
from fedsim_defenses.top_k import TopK

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)
DELTA = 1e-5
CLIENT_DP = chain(Clip(norm=2.0), GaussianNoise(multiplier=1.5))


def of(stack: Stack, **changes: Any) -> PrivacyClaim:
    arguments = {"rounds": 1, "num_examples": 100, "delta": DELTA, **changes}
    return claim(stack, arguments.pop("declared", DECLARED), Entry(**arguments))


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (chain(), "no noise"),
        (chain(Clip(norm=1.0)), "no noise"),
        (chain(GradientPruning(ratio=0.99)), "no noise"),
        (chain(Aggregate()), "no noise"),
        (chain(Dropout(rate=0.5), LocalAggregation(steps=3)), "no noise"),
        (chain(GaussianNoise(std=10.0)), "put clip first"),
        (chain(GaussianNoise(std=10.0), Clip(norm=1.0)), "put clip first"),
        (chain(Clip(norm=1.0), Quantization(bits=8), GaussianNoise(std=10.0)), "put clip first"),
        (chain(Clip(norm=1.0), TopK(ratio=0.1), GaussianNoise(std=10.0)), "put clip first"),
        (chain(Clip(norm=1.0), GaussianNoise(multiplier=0.0)), "no noise"),
        (chain(DPSGD(norm=1.0, noise_multiplier=0.0)), "noise_multiplier is 0"),
        (chain(Clip(norm=1.0), GaussianNoise(multiplier=1e-200)), "too small"),
    ],
)
def test_an_unknown_stack_is_infinite_with_the_reason(stack: Stack, reason: str) -> None:
    found = of(stack)
    assert found.epsilon == math.inf
    assert (found.delta, found.accountant, found.unit, found.relation) == (None,) * 4
    assert reason in (found.reason or "")


def test_the_sensitivity_is_tied_to_the_clip() -> None:
    wide = chain(Clip(norm=20.0), GaussianNoise(std=3.0))
    assert of(wide).epsilon == gaussian.epsilon(3.0 / 20.0, DELTA)
    narrow = chain(Clip(norm=2.0), GaussianNoise(std=3.0))
    assert of(narrow).epsilon == of(CLIENT_DP).epsilon < of(wide).epsilon
    local = replace(DECLARED, algorithm="fedavg", steps=20, momentum=0.9)
    assert of(CLIENT_DP, declared=local) == of(CLIENT_DP), "the whole update is clipped"
    assert of(CLIENT_DP, rounds=0).epsilon == 0


@pytest.mark.parametrize("sampling", ["without_replacement", "poisson"])
def test_who_is_known_to_be_drawn_is_protected_as_if_nobody_drew(sampling: str) -> None:
    stack = chain(DPSGD(norm=1.0, noise_multiplier=2.0))
    declared = replace(DECLARED, sampling=sampling)
    known = of(stack, declared=declared, rounds=3, drawn=True)
    assert of(stack, declared=declared, rounds=3).epsilon < known.epsilon
    reach = 2 if sampling == "without_replacement" else 1
    assert known.epsilon == pytest.approx(gaussian.epsilon(2.0 / (reach * math.sqrt(3)), DELTA))


@pytest.mark.parametrize(
    "after",
    [(GradientPruning(ratio=0.9),), (Quantization(bits=4),), (TopK(ratio=0.1),), (Aggregate(),)],
)
def test_post_processing_changes_nothing(after: tuple[Any, ...]) -> None:
    noisy = (Clip(norm=2.0), GaussianNoise(multiplier=1.5))
    assert of(chain(*noisy, *after)) == of(CLIENT_DP)


def test_released_batch_norm_statistics_are_unprotected() -> None:
    found = of(CLIENT_DP, buffers_released=True)
    assert found.epsilon == math.inf
    assert "norm: group" in (found.reason or "")
    undefended = of(chain(), buffers_released=True)
    assert "no noise" in (undefended.reason or "")


DP_SGD = chain(DPSGD(norm=1.0, noise_multiplier=1.1))


def test_dp_sgd_hides_one_example_in_place_of_any_other() -> None:
    found = of(DP_SGD, rounds=10)
    assert (found.unit, found.relation) == ("example", "replace_one")
    assert found.accountant == ledger.RENYI
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.GaussianDpEvent(1.1 / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 4, event), 10)
    assert found.epsilon == pytest.approx(accountant.get_epsilon(DELTA))


def test_without_sampling_replacing_an_example_doubles_the_sensitivity() -> None:
    whole = of(DP_SGD, num_examples=4, rounds=3)
    assert whole.accountant == ledger.EXACT
    # dp_accounting's PLD accountant is told the bound C of one contribution and doubles it itself
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(1.1), 3)
    assert whole.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)


@pytest.mark.parametrize("num_examples", [5, 20, 100])
@pytest.mark.parametrize("multiplier", [0.5, 1.1, 4.0])
def test_the_sampled_claim_lies_between_a_real_pair_and_no_amplification(
    num_examples: int, multiplier: float
) -> None:
    stack = chain(DPSGD(norm=1.0, noise_multiplier=multiplier))
    found = of(stack, num_examples=num_examples).epsilon
    # All other gradients zero, the one in question +C or -C: the released sum over C is one of
    q, at = 4 / num_examples, np.linspace(-60, 60, 400_001)
    plus = (1 - q) * norm.pdf(at, 0, multiplier) + q * norm.pdf(at, 1, multiplier)
    minus = (1 - q) * norm.pdf(at, 0, multiplier) + q * norm.pdf(at, -1, multiplier)
    assert np.trapezoid(np.maximum(plus - math.exp(found) * minus, 0), at) <= DELTA
    assert 0 < found <= gaussian.epsilon(multiplier / 2, DELTA)


def test_every_local_step_is_a_release() -> None:
    five = LocalTraining(algorithm="fedavg", steps=5, batch_size=4, lr=0.1)
    assert of(DP_SGD, declared=five).epsilon == of(DP_SGD, rounds=5).epsilon
    by_defense = chain(DPSGD(norm=1.0, noise_multiplier=1.1), LocalAggregation(steps=5))
    assert of(by_defense).epsilon == of(DP_SGD, rounds=5).epsilon


def test_steps_on_the_same_batch_are_not_amplified() -> None:
    same = LocalTraining(algorithm="fedavg", steps=5, batch_size=4, lr=0.1, batches="same")
    found = of(DP_SGD, declared=same)
    assert found.accountant == ledger.EXACT
    assert found.epsilon == gaussian.epsilon(1.1 / 2 / math.sqrt(5), DELTA)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_is_a_probability(delta: float) -> None:
    with pytest.raises(FedsimError, match="delta"):
        of(CLIENT_DP, delta=delta)
