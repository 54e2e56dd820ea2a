"""CorrelatedNoise: its noise over steps and rounds, what it remembers, what it claims."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import Stack, chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.scenario.resolve import resolve
from fedsim.testing.cases import local_step, same, stream
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import LocalTraining, PrivacyClaim, Tensors
from fedsim_defenses.correlated_noise import CorrelatedNoise
from fedsim_defenses.dp_sgd import DPSGD

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)
IMAGES, LABELS = torch.randn(4, 1, 2, 2, generator=stream(0)), torch.tensor([0, 1, 2, 0])


NOISE = {"norm": 1.0, "noise_multiplier": 2.0}


def noisy(correlation: float, multiplier: float = 1.5) -> CorrelatedNoise:
    return CorrelatedNoise(norm=0.8, noise_multiplier=multiplier, correlation=correlation)


def loss(at: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(images.flatten(1) @ at["w"].T, labels)


def still(at: Tensors, *_: Tensor) -> Tensor:
    return at["w"].sum() * 0


def weights(rows: int = 3) -> dict[str, Tensor]:
    return {"w": torch.randn(rows, 4, generator=stream(1))}


def _never(*_: object) -> Tensors:
    raise AssertionError("correlated_noise computes gradients of its own")


def test_without_noise_it_is_clipped_sgd() -> None:
    direction = noisy(0.7, 0.0).gradient(local_step(loss, _never, 4))
    plain = DPSGD(norm=0.8, noise_multiplier=0.0).gradient(local_step(loss, _never, 4))
    for _ in range(2):
        assert same(
            direction(weights(), IMAGES, LABELS, stream(2)),
            plain(weights(), IMAGES, LABELS, stream(2)),
        )
    assert noisy(0.7, 0.0).guarantee(Guarantee(), DECLARED).mechanism is None


def take_step(of: Stack | CorrelatedNoise, seed: int) -> Tensors:
    """What a client with gradients of zero releases in a step."""
    direction = of.gradient(local_step(still, _never, 4))
    return direction({"w": torch.zeros(2, 4)}, IMAGES, LABELS, stream(seed))


def test_a_client_that_failed_in_between_forgets_nothing_and_leaks_nothing() -> None:
    stack = chain(noisy(0.6))
    with stack.memory_of({}) as left:
        take_step(stack, 0)
    kept = dict(left)
    with pytest.raises(RuntimeError), stack.memory_of(kept):
        take_step(stack, 1)
        raise RuntimeError
    with stack.memory_of({}) as another:
        found = take_step(stack, 5)
    assert same(found, take_step(noisy(0.0), 5))
    assert not same(another, kept)


def test_it_is_remembered_beside_other_defenses() -> None:
    """In a real workload: noise of round 2 depends on round 1's, error feedback too, probes on
    nothing that they change."""
    stacks = {
        f"c{correlation}": [
            {"name": "correlated_noise", **NOISE, "correlation": correlation},
            {"name": "top_k", "ratio": 1.0},
        ]
        for correlation in (0.0, 0.5)
    }
    scenario = resolve(
        tiny_scenario(
            data__clients=3,
            model={"name": "kan", "hidden": 4},
            training__rounds=3,
            defenses=stacks,
            observe={"batch_sizes": [2]},
            privacy={"probes": "outside"},
        )
    )
    found: dict[float, list[Tensor]] = {}
    for correlation in (0.0, 0.5):
        workload = Workload(scenario, f"c{correlation}")
        at, buffers = workload.initial()
        at = {name: torch.zeros_like(value) for name, value in at.items()}
        state: Tensors = {}
        found[correlation] = []
        for round in (1, 2, 3):
            probe = Probe(batch_size=2, trial=0)
            probed = workload.client_update(1, round, at, buffers, state, probe=probe)
            assert probed.state is state
            result = workload.client_update(1, round, at, buffers, state)
            state = result.state
            assert any(name.startswith("training.0.") for name in state) == (correlation > 0)
            found[correlation].append(result.update.tensors["body.3.weight"])
        assert workload.stack.remembers
    # The gradient of this layer is zero where both layers are: its update is the noise.
    plain, taken_back = found[0.0], found[0.5]
    torch.testing.assert_close(taken_back[0], plain[0])
    torch.testing.assert_close(taken_back[1], plain[1] - 0.5 * plain[0])
    torch.testing.assert_close(taken_back[2], plain[2] - 0.5 * plain[1])


def claimed(correlation: float = 0.5, **changes: Any) -> PrivacyClaim:
    fields = {f.name for f in dataclasses.fields(LocalTraining)}
    local = {key: changes.pop(key) for key in fields & changes.keys()}
    arguments = {"rounds": 20, "num_examples": 100, "delta": 1e-5, **changes}
    declared = dataclasses.replace(DECLARED, **local)
    return claim(chain(noisy(correlation, 8.0)), declared, Entry(**arguments))


def test_the_ledger_claims_the_curve_of_fixed_size_batches() -> None:
    curve = CorrelatedCurve(
        steps=20,
        sampling_rate=0.04,
        correlation=0.5,
        sampling="fixed_size",
        relation="replace_one",
        noise_multiplier=8.0,
    )
    found = claimed()
    assert found.epsilon == curve.epsilon(1e-5).epsilon
    assert (found.unit, found.relation) == ("example", "replace_one")
    assert found.accountant is not None and "correlated" in found.accountant
    local = claimed(algorithm="fedavg", steps=4, rounds=5)
    assert local.epsilon == found.epsilon


def test_the_ledger_never_amplifies_what_it_cannot() -> None:
    full = CorrelatedCurve(
        steps=20, correlation=0.5, sampling="full", relation="replace_one", noise_multiplier=8.0
    )
    expected = full.epsilon(1e-5).epsilon
    assert claimed(batch_size=100).epsilon == expected
    assert claimed(algorithm="fedavg", steps=4, rounds=5, batches="same").epsilon == expected
    assert claimed().epsilon < expected
    assert claimed(correlation=0.0).epsilon < claimed().epsilon < claimed(correlation=0.9).epsilon
