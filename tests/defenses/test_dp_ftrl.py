"""DPFTRL: its noise over rounds, what it divides by, what it claims of which client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

from fedsim.contracts.defense import ServerRound
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import chain
from fedsim.privacy.composition import correlated
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.numerics import gaussian
from fedsim.scenario.resolve import resolve
from fedsim.testing.cases import stream
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, LocalTraining, Update
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_ftrl import DPFTRL
from fedsim_defenses.gaussian_noise import GaussianNoise

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)


def server(defense: DPFTRL, round: int, entries: int = 20_000) -> Tensor:
    """What is shown of the sum of two updates of ones, under a bound of 0.5."""
    updates = [Update(tensors={"a": torch.ones(entries)}, num_examples=n) for n in (1, 9)]
    shown = defense.add_noise(
        defense.combine(updates),
        ServerRound(
            clients=4,
            sensitivity=0.5,
            stream=stream(round),
            before=stream(round - 1) if round > 1 else None,
        ),
    )
    return shown.tensors["a"]


def test_without_noise_it_is_the_sum_over_those_who_are_asked() -> None:
    found = server(DPFTRL(noise_multiplier=0.0, correlation=0.9), 2)
    assert torch.equal(found, torch.full_like(found, 2 / 4))


def scenario(**changes: Any) -> Any:
    clip = {"name": "clip", "norm": 0.1}
    base = tiny_scenario(
        data__clients=3,
        model={"name": "kan", "hidden": 4},
        training__rounds=3,
        federation={"participation": 0.67},
        defenses={
            "none": ["aggregate"],
            "bounded": [clip, {"name": "dp_ftrl", "noise_multiplier": 0}],
            **{
                f"c{c}": [clip, {"name": "dp_ftrl", "noise_multiplier": 2.0, "correlation": c}]
                for c in (0.0, 0.5)
            },
        },
        observe={"batch_sizes": [2]},
        privacy={"delta": 1e-3, "probes": "outside"},
    )
    return resolve({**base, **changes})


def test_a_workload_goes_on_from_the_round_before_and_a_probe_changes_nothing() -> None:
    resolved = scenario()
    plain, taken = (Workload(resolved, name) for name in ("c0.0", "c0.5"))
    update = Update(tensors={"a": torch.zeros(1000)}, num_examples=4)
    noise = [plain.combine_updates([update], round).tensors["a"] for round in (1, 2)]
    found = [taken.combine_updates([update], round).tensors["a"] for round in (1, 2)]
    torch.testing.assert_close(found[0], noise[0])
    torch.testing.assert_close(found[1], noise[1] - 0.5 * noise[0])
    assert float(noise[0].std()) == pytest.approx(2.0 * 0.1 / 2, rel=0.12), "two are asked"
    probes = [Probe(batch_size=2, trial=t, release=r) for t in (0, 1) for r in (0, 1)]
    drawn = [plain.combine_updates([update], 2, probe).tensors["a"] for probe in probes]
    assert len({float(each[0]) for each in [*drawn, noise[1]]}) == 5
    assert torch.equal(taken.combine_updates([update], 2).tensors["a"], found[1])


def proven(*defenses: Any) -> Guarantee:
    return chain(*defenses).guarantees(DECLARED)[-1]


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_the_ledger_claims_the_farthest_clients_curve(correlation: float) -> None:
    stack = chain(Clip(norm=2.0), DPFTRL(noise_multiplier=6.0, correlation=correlation))
    arguments: dict[str, Any] = {"num_examples": 50, "delta": 1e-5}
    full = claim(stack, DECLARED, Entry(rounds=10, **arguments))
    reach = correlated.sensitivity(10, correlation)
    assert full.epsilon == pytest.approx(float(gaussian.epsilon(6.0 / reach, 1e-5)), rel=1e-12)
    assert (full.unit, full.relation) == ("client", "zero_out")
    early = (True,) * 3 + (False,) * 7
    spread = (True, False, False) * 3 + (True,)
    of = {
        schedule: claim(
            stack, DECLARED, Entry(rounds=sum(schedule), schedules={schedule}, **arguments)
        )
        for schedule in (early, spread)
    }
    worst = correlated.sensitivity(10, correlation, 3)
    assert of[early].epsilon == pytest.approx(float(gaussian.epsilon(6.0 / worst, 1e-5)))
    both = claim(stack, DECLARED, Entry(rounds=4, schedules=set(of), **arguments))
    assert both.epsilon == max(found.epsilon for found in of.values()) < full.epsilon
    never = claim(stack, DECLARED, Entry(rounds=0, schedules={(False,) * 4}, **arguments))
    assert never.epsilon == 0


def test_without_a_bound_it_is_refused() -> None:
    for before in ([], [GaussianNoise(std=1.0)]):
        with pytest.raises(FedsimError, match="put clip directly before it"):
            proven(*before, DPFTRL(noise_multiplier=1.0))


def test_what_clients_proved_themselves_stands() -> None:
    own = [Clip(norm=1.0), GaussianNoise(multiplier=2.0), Clip(norm=1.0)]
    found = proven(*own, DPFTRL(noise_multiplier=1.0, correlation=0.5)).mechanism
    assert found == proven(*own).mechanism
