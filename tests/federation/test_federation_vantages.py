"""Who sees what: server, eavesdropper and participants, of one release and of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import (
    CLIP,
    Fault,
    contents,
    observation,
    plugin,
    same,
    scenario,
    train,
    train_with_fault,
    workload,
)
from flwr.app import Message

from fedsim.federation import refusals, wire
from fedsim.recording.truth import IncompleteTruth, load_truth
from fedsim.results.rows import spent
from fedsim.scenario import Scenario
from fedsim.types import FedsimError, GroundTruth, Observation, Tensors

SEEN = "none/round-0001/participant-0000-training"
CONVNET = {"name": "convnet", "parameters": {"width": 4, "norm": "batch"}}


def watched(*vantages: str, **changes: Any) -> Scenario:
    observe = {"rounds": [1], "clients": [0], "vantages": list(vantages)}
    wanted = {"data__clients": 2, "observe": observe, **changes}
    return scenario(**dict(sorted(wanted.items(), key=lambda item: "__" in item[0])))


def distance(one: Tensors, other: Tensors) -> float:
    """The largest difference of an entry, of the largest entry."""
    largest = max(float(value.abs().max()) for value in other.values())
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def both(out: Path, wanted: Scenario, stack: str = "none") -> tuple[Observation, Observation]:
    """What client 0 saw of client 1, and what the server saw of it."""
    train(wanted, out, stack)
    seen = observation(out, f"{stack}/round-0001/participant-0000-training")
    return seen, observation(out, f"{stack}/round-0001/client-0001-training")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__local": {"steps": 3, "batch_size": 4, "lr": 0.05, "momentum": 0.5}},
        {"defenses": {"none": [CLIP, plugin("gaussian_noise", multiplier=0.5)]}},
    ],
    ids=["gradient", "weights", "noise"],
)
def test_of_two_clients_one_sees_the_others_update(tmp_path: Path, changes: dict[str, Any]) -> None:
    observe = {"rounds": [1, 2], "clients": "all", "vantages": ["server", "client"]}
    wanted = watched(**{**changes, "observe": observe})
    seen, sent = both(tmp_path, wanted)
    assert distance(seen.update, sent.update) < 1e-4
    assert (seen.vantage, seen.client, seen.num_clients) == ("client", 0, 1)
    apart = {"parameters", "buffers", "update", "buffers_update", "id", "vantage", "client"}
    for field in dataclasses.fields(seen):
        if field.name not in apart:
            assert getattr(seen, field.name) == getattr(sent, field.name), field.name
    assert all(torch.equal(seen.parameters[n], value) for n, value in sent.parameters.items())
    for looker in (0, 1):
        theirs = load_truth(tmp_path, f"none/round-0002/participant-000{looker}-training", 1)
        true = load_truth(tmp_path, f"none/round-0002/client-000{1 - looker}-training", 1)
        assert isinstance(theirs, GroundTruth) and isinstance(true, GroundTruth)
        assert torch.equal(theirs.images, true.images)
    assert not list(tmp_path.glob("observations/none/round-0003/*"))


def test_batch_norm_statistics_of_the_other_are_seen_too(tmp_path: Path) -> None:
    observe = {"rounds": [1], "clients": "all", "vantages": ["server", "client"]}
    data = {"source": {"name": "digits", "parameters": {"size": 12}}}
    seen, sent = both(tmp_path, watched(model=CONVNET, observe=observe, data=data))
    assert sent.buffers_update
    assert distance(seen.buffers_update, sent.buffers_update) < 1e-4
    assert list(seen.buffers) == list(sent.buffers)


def test_of_many_clients_one_sees_the_mean_of_the_others(tmp_path: Path) -> None:
    observe = {"rounds": [1], "clients": "all", "vantages": ["client", "server"]}
    wanted = watched(data__clients=4, observe=observe)
    seen, one = both(tmp_path, wanted)
    others = [
        one,
        *(observation(tmp_path, f"none/round-0001/client-000{n}-training") for n in (2, 3)),
    ]
    mean = {n: sum(o.update[n] for o in others) / 3 for n in one.update}
    assert distance(seen.update, mean) < 1e-4
    assert seen.num_clients == 3 and seen.num_images == 12
    truth = load_truth(tmp_path, SEEN, 3)
    assert isinstance(truth, GroundTruth) and len(truth.images) == 12


@pytest.mark.parametrize("noise", [None, 0.5])
def test_behind_an_aggregation_a_participant_takes_its_own_off(
    tmp_path: Path, noise: float | None
) -> None:
    last = plugin("dp_ftrl", noise_multiplier=noise) if noise else plugin("aggregate")
    stack = [CLIP, last]
    vantages = ["server", "client"]
    wanted = watched(*vantages, data__clients=3, defenses={"sum": stack, "none": [CLIP]})
    train(wanted, tmp_path / "sum", "sum")
    aggregate = observation(tmp_path / "sum", "sum/round-0001/aggregate-training")
    seen = observation(tmp_path / "sum", "sum/round-0001/participant-0000-training")
    train(wanted, tmp_path / "none", "none")
    own = observation(tmp_path / "none", "none/round-0001/client-0000-training")
    rest = {n: (3 * aggregate.update[n] - own.update[n]) / 2 for n in own.update}
    assert distance(seen.update, rest) < 1e-4
    assert (seen.vantage, seen.num_clients, seen.effect) == ("client", 2, aggregate.effect)


def test_the_client_alone_is_recorded_where_only_it_looks(tmp_path: Path) -> None:
    train(watched("client"), tmp_path)
    assert [p.name for p in sorted(tmp_path.glob("observations/none/*/*.json"))] == [
        "participant-0000-training.json"
    ]
    assert {p.parent.name for p in tmp_path.glob("truth/none/*/*/*")} == {
        "participant-0000-training"
    }


def failing(client: int) -> Fault:
    def fault(who: int, message: Message, honest: Callable[[], Message]) -> Message:
        answer = honest()
        if who == client:
            raise RuntimeError("broken after it trained")
        return answer

    return fault


def test_a_round_without_one_of_the_others_is_never_scored(tmp_path: Path) -> None:
    wanted = watched("client", data__clients=3)
    train_with_fault(wanted, tmp_path, failing(2))
    assert observation(tmp_path, SEEN).num_clients == 2
    with pytest.raises(IncompleteTruth, match="of 1 client and the observation of 2"):
        load_truth(tmp_path, SEEN, 2)


def test_who_is_left_out_sees_nothing(tmp_path: Path) -> None:
    train_with_fault(watched("client", data__clients=3), tmp_path, failing(0))
    assert not list(tmp_path.glob("observations/none/round-0001/*.json"))


def test_a_run_that_goes_on_records_the_same(tmp_path: Path) -> None:
    wanted = watched("server", "client")
    train(wanted, tmp_path / "whole")

    def dies(who: int, message: Message, honest: Callable[[], Message]) -> Message:
        if wire.read_order(message.content).round == 2:
            raise KeyboardInterrupt
        return honest()

    with pytest.raises(KeyboardInterrupt):
        train_with_fault(wanted, tmp_path / "broken", dies)
    train(wanted, tmp_path / "broken", resume=True)
    kept = {n: d for n, d in contents(tmp_path / "whole").items() if n.startswith("observations")}
    assert any("participant" in name for name in kept)
    broken = contents(tmp_path / "broken")
    assert {n: broken.get(n) for n in kept} == kept


def test_plaintext_shows_an_eavesdropper_what_the_server_decodes(tmp_path: Path) -> None:
    observe = {
        "rounds": [2],
        "clients": [0, 1],
        "vantages": ["server", "eavesdropper"],
        "batch_sizes": [2],
        "trials": 2,
    }
    train(watched(observe=observe, federation={"tls": False}), tmp_path)
    for client in (0, 1):
        for trial in (0, 1):
            suffix = f"000{client}-b2-t{trial}"
            server = observation(tmp_path, f"none/round-0002/client-{suffix}")
            heard = observation(tmp_path, f"none/round-0002/wire-{suffix}")
            assert (server.vantage, heard.vantage) == ("server", "eavesdropper")
            assert all(torch.equal(heard.update[n], v) for n, v in server.update.items())
            assert (heard.client, heard.num_clients) == (client, 1)
            load_truth(tmp_path, heard.id, 1)


def test_tls_shows_an_eavesdropper_no_update(tmp_path: Path) -> None:
    train(watched("eavesdropper", "server"), tmp_path)
    assert not list(tmp_path.rglob("wire-*"))
    assert len(list(tmp_path.rglob("client-0000-training.json"))) == 1


def test_a_participant_of_no_two_rounds_in_a_row_is_refused() -> None:
    wanted = watched("client", data__clients=9, federation={"participation": 0.3}, seed=1)
    with pytest.raises(FedsimError, match="rounds 1 and 2"):
        refusals.check(workload(wanted))


ID = "round-0003/client-0000-b4-t0"


def probing(releases: int, **changes: object) -> Scenario:
    defenses = {
        "none": [],
        "noise": [plugin("gaussian_noise", std=0.5)],
        "secure": [{"name": "aggregate"}],
        "dp": [plugin("dp_sgd", norm=1.0, noise_multiplier=4.0)],
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
    def lose(client: int, message: Message, honest: Callable[[], Message]) -> Message:
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
    dp_sgd = plugin("dp_sgd", norm=1.0, noise_multiplier=1.0)
    quiet = scenario(defenses={"dp": [dp_sgd]}, training__rounds=1)
    outside = probing(16, training__rounds=1, privacy={"probes": "outside"})
    unasked = spent(workload(outside, "dp"), 1)
    assert unasked.epsilon < spent(workload(probing(16, training__rounds=1), "dp"), 1).epsilon
    assert "outside" in unasked.covers
    assert spent(workload(quiet, "dp"), 1).epsilon > unasked.epsilon, "of a fourth of the noise"
