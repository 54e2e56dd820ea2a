"""Canaries in a federated run: they find what is claimed, never more, and catch what lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import find_bound

import fedsim
from fedsim.audit import bounds, check, two_worlds
from fedsim.contracts.defense import NoisyAggregation, ServerRound
from fedsim.contracts.stack import Stack
from fedsim.privacy.composition import correlated
from fedsim.results import rows
from fedsim.scenario import Scenario
from fedsim.scenario.model import Audit
from fedsim.scenario.resolve import resolve
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Tensors, Update

pytestmark = pytest.mark.usefixtures("attacks_here")

CLIENT = [{"name": "clip", "norm": 0.5}, {"name": "gaussian_noise", "multiplier": 1.5}]
EXAMPLE = [{"name": "dp_sgd", "norm": 0.2, "noise_multiplier": 1.0}]
BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 5,
    "data": {"source": "digits", "clients": 40},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 2, "local": {"batch_size": 35, "lr": 0.2}},
    "defenses": {
        "none": [],
        "client": CLIENT,
        "hidden": [*CLIENT, "aggregate"],
        "sparse": [*CLIENT, {"name": "top_k", "ratio": 0.2}],
        "example": EXAMPLE,
    },
    "attacks": [],
    "audit": {"canaries": 1000, "confidence": 0.99},
}


def scenario(**changes: Any) -> Scenario:
    return resolve({**BASE, **changes})


def workload(stack: str, **changes: Any) -> Workload:
    resolved = scenario(**changes)
    return Workload(resolved, stack, load_dataset(resolved))


@pytest.mark.slow
@pytest.mark.parametrize(("stack", "found"), [("client", 0.5), ("hidden", 0.5), ("sparse", 0.3)])
def test_a_clients_claim_is_approached_and_not_exceeded(stack: str, found: float) -> None:
    audited = workload(stack)
    bound, claimed = find_bound(audited)
    assert rows.spent(audited, 2).unit == "client"
    assert found * claimed < bound <= claimed


@pytest.mark.slow
def test_an_examples_claim_is_approached_and_not_exceeded() -> None:
    """Of one batch of everything: two gradients of one image differ by about 1.5 of the 2 C."""
    once = {"rounds": 1, "local": {"batch_size": 35, "lr": 0.2}}
    audited = workload("example", training=once, audit={"canaries": 500, "confidence": 0.99})
    assert min(map(len, audited.parts)) == 35
    claim = rows.spent(audited, 1)
    bound, claimed = find_bound(audited)
    assert (claim.unit, claim.accountant) == ("example", "exact Gaussian")
    assert 0.35 * claimed < bound <= claimed


@pytest.mark.slow
def test_the_sign_of_weight_differences_is_the_gradients() -> None:
    """Under fedavg the update points against the gradient: missed, nothing would be found."""
    local = {"batch_size": 35, "lr": 0.2, "steps": 2}
    audited = workload("example", training={"rounds": 1, "local": local}, audit={"canaries": 200})
    assert find_bound(audited)[0] > 1


@pytest.mark.slow
def test_an_example_that_is_there_or_not_is_found_where_batches_are_drawn_independently() -> None:
    """Of a batch of nearly all, released once. Without a Gaussian fit, 1,000 draws show a fifth."""
    audited = workload(
        "example",
        training={"rounds": 1, "local": {"batch_size": 34, "lr": 0.2, "sampling": "poisson"}},
        observe={"batch_sizes": [1]},
        privacy={"probes": "outside"},
    )
    claim = rows.spent(audited, 1)
    bound, claimed = find_bound(audited)
    assert (claim.unit, claim.relation) == ("example", "zero_out")
    assert 0.15 * claimed < bound <= claimed


@pytest.mark.slow
@pytest.mark.parametrize("less", [0.8, 1.0])
def test_a_fifth_less_noise_than_claimed_is_caught(
    less: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = workload(
        "client", training={"rounds": 1, "local": {"batch_size": 35}}, audit={"canaries": 4000}
    )
    honest = Stack.apply

    def lying(
        stack: Stack, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return honest(stack, update, {k: less * v for k, v in state.items()}, rng)

    monkeypatch.setattr(Stack, "apply", lying)
    bound, claimed = find_bound(audited)
    assert (bound > claimed) == (less < 1)


def test_bounds_that_are_both_tried_share_what_may_go_wrong() -> None:
    """The larger of two bounds at 99% would hold at 98% only."""
    alike = np.zeros(bounds.LEAST_DRAWS)
    for gaussian, each in ((True, [0.995, 0.995]), (False, [0.99])):
        found = bounds.two_world_bounds(
            alike, alike, delta=1e-5, confidence=0.99, gaussian=gaussian
        )
        assert [bound.confidence for bound in found] == pytest.approx(each)
        assert all(bound.epsilon == 0 for bound in found)


@pytest.mark.slow
def test_it_is_reproducible_and_leaves_the_workload_as_it_was() -> None:
    once = {"rounds": 1, "local": {"batch_size": 35, "lr": 0.2}}
    audited = workload("example", training=once, audit={"canaries": 200})
    before = audited.dataset, audited.parts, audited.scenario
    found = find_bound(audited)
    assert found[0] > 0, "else it would say nothing that it is found again"
    assert find_bound(audited) == found
    assert (audited.dataset, audited.parts, audited.scenario) == before


def test_stacks_that_claim_nothing_have_nothing_to_audit(tmp_path: Path) -> None:
    assert rows.audit_row(workload("none")) is None
    with pytest.raises(FedsimError, match="audit: no stack of defenses has a privacy claim"):
        fedsim.run(scenario(defenses={"none": []}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_claim_without_a_canary_is_refused() -> None:
    claim, audit = rows.spent(workload("client"), 1), Audit()
    check(audit, {"client": claim}, 40)
    with pytest.raises(FedsimError, match="no canary for the claim of odd, per client under repl"):
        check(audit, {"odd": replace(claim, relation="replace_one")}, 40)


def noisy_server(**changes: Any) -> Workload:
    """A server with correlated noise of its own, of few clients asked at a time."""
    server = {"name": "dp_ftrl", "noise_multiplier": 3.0, "correlation": 0.7}
    return workload(
        "server",
        **{
            "data": {"source": {"name": "digits", "size": 8}, "clients": 4},
            "training": {"rounds": 16, "local": {"batch_size": 35}},
            "federation": {"participation": 0.25},
            "privacy": {"delta": 0.1},
            "defenses": {"server": [{"name": "clip", "norm": 0.5}, server]},
            "audit": {"canaries": 300},
            **changes,
        },
    )


@pytest.mark.slow
def test_who_is_asked_when_is_that_of_the_run() -> None:
    """Rounds in a row would show more of a client than those that it is asked in."""
    audited = noisy_server()
    taken = rows.account_of(audited).participations(16)
    present = [[past in each for past in range(1, 17)] for each in taken]
    in_a_row = correlated.sensitivity(16, 0.7, max(map(len, taken)))
    assert correlated.reach(present, 0.7) < 0.9 * in_a_row
    bound, claimed = find_bound(audited)
    assert 0.3 * claimed < bound <= claimed
    rounds, weights = two_worlds._worst_participation(audited, taken)
    assert tuple(sorted(rounds)) in taken
    # Signal over noise of the weighted sum of C^-1 (C z + Z) is ||C z||.
    matrix = np.array([[0.7 ** max(i - j, 0) * (i >= j) for j in range(16)] for i in range(16)])
    chosen = np.isin(np.arange(1, 17), list(rounds))
    noise = np.linalg.solve(matrix.T, weights)
    told = float(weights @ chosen) / float(np.linalg.norm(noise))
    assert told == pytest.approx(correlated.reach(present, 0.7))


@pytest.mark.slow
def test_a_server_with_less_noise_than_claimed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    audited = noisy_server()
    assert isinstance(audited.stack.aggregation, NoisyAggregation)
    server = type(audited.stack.aggregation)
    honest: Callable[..., Update] = server.add_noise

    def lying(self: Any, combined: Update, round: ServerRound) -> Update:
        return honest(self, combined, replace(round, sensitivity=0.6 * round.sensitivity))

    monkeypatch.setattr(server, "add_noise", lying)
    bound, claimed = find_bound(audited)
    assert bound > claimed
