"""Several releases of the same batch: what the server records is their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from federation_support import observation, same, scenario, train, train_with_fault, workload
from flwr.app import Message

from fedsim.federation import wire
from fedsim.results.rows import spent
from fedsim.scenario import Scenario

Honest = Callable[[], Message]
NOISE = {"name": "gaussian_noise", "parameters": {"std": 0.5}}
ID = "round-0003/client-0000-b4-t0"


def probing(releases: int, **changes: object) -> Scenario:
    defenses = {
        "none": [],
        "noise": [NOISE],
        "secure": [{"name": "aggregate"}],
        "dp": [{"name": "dp_sgd", "parameters": {"norm": 1.0, "noise_multiplier": 4.0}}],
    }
    observe = {"rounds": ["last"], "clients": [0], "batch_sizes": [4], "releases": releases}
    return scenario(defenses=defenses, observe=observe, **changes)


def test_noise_averages_out(tmp_path: Path) -> None:
    train(probing(16), tmp_path, "noise")
    train(probing(16), tmp_path)
    seen, clean = observation(tmp_path, f"noise/{ID}"), observation(tmp_path, f"none/{ID}")
    # The weights differ: the stacks have trained apart. Compare with what the client computes.
    honest = workload(probing(16)).client_update(
        0, 3, seen.parameters, {}, {}, probe=workload(probing(16)).plan(3).probes[0]
    )
    noise = torch.cat(
        [(seen.update[n] - value).flatten() for n, value in honest.update.tensors.items()]
    )
    assert float(noise.std()) == pytest.approx(0.5 / 4, rel=0.15)
    assert (seen.releases, clean.releases) == (16, 16)


def test_what_is_not_random_stays_to_the_bit(tmp_path: Path) -> None:
    for count in (1, 3):
        for stack in ("none", "secure"):
            train(probing(count), tmp_path / str(count), stack)
    for id in (f"none/{ID}", "secure/round-0003/aggregate-b4-t0"):
        once, thrice = (observation(tmp_path / str(count), id) for count in (1, 3))
        assert same(dict(once.update), dict(thrice.update))
        assert once.num_clients == thrice.num_clients
        assert (once.releases, thrice.releases) == (1, 3)


def test_the_first_release_is_the_one_without_others(tmp_path: Path) -> None:
    """So that a scenario's bytes do not depend on whether releases can be repeated."""
    asked = workload(probing(2), "noise")
    parameters, _ = asked.initial()
    (probe,) = asked.plan(3).probes
    results = [
        load.client_update(0, 3, parameters, {}, {}, probe=probe).update.tensors
        for load in (asked, workload(probing(1), "noise"))
    ]
    assert same(dict(results[0]), dict(results[1]))


def test_a_lost_release_is_left_out_of_the_mean(tmp_path: Path) -> None:
    def lose(client: int, message: Message, honest: Honest) -> Message:
        probe = wire.read_order(message.content).probe
        if client == 0 and probe and probe.release == 1:
            raise RuntimeError("out of memory")
        return honest()

    records = train_with_fault(probing(3), tmp_path, lose)
    assert observation(tmp_path, f"none/{ID}").releases == 2
    assert [record.probe_failures for record in records] == [0, 0, 1]
    assert all(record.aggregated == 4 for record in records)


def test_the_ledger_counts_every_release() -> None:
    """Of one batch: all its releases are one of a fourth of the noise, sampled once.

    That costs more than 16 batches drawn anew would.
    """
    once, often = (spent(workload(probing(count), "dp"), 3).epsilon for count in (1, 16))
    assert often > 16 * once
    quiet = scenario(
        defenses={"dp": [{"name": "dp_sgd", "parameters": {"norm": 1.0, "noise_multiplier": 1.0}}]},
        training__rounds=1,
    )
    outside = probing(16, training__rounds=1, privacy={"probes": "outside"})
    unasked = spent(workload(outside, "dp"), 1)
    assert unasked.epsilon < spent(workload(probing(16, training__rounds=1), "dp"), 1).epsilon
    assert "outside" in unasked.covers
    assert spent(workload(quiet, "dp"), 1).epsilon > unasked.epsilon, "of a fourth of the noise"
