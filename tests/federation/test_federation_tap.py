"""What the tap records, counts and lets through, with every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import stopped
from federation_support import (
    BATCH_NORM,
    CLIP,
    STRATEGIES,
    TOPK,
    Fault,
    contents,
    final_model,
    observation,
    plugin,
    results,
    same,
    scenario,
    train,
    train_with_fault,
    with_strategy,
    workload,
)
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedsim.contracts.defense import global_norm
from fedsim.federation import local, tap, wire
from fedsim.federation.local import LocalGrid
from fedsim.federation.records import REASONS, RoundRecord
from fedsim.federation.refusals import check
from fedsim.federation.spool import Spool
from fedsim.federation.wire import size_of
from fedsim.privacy.numerics import gaussian
from fedsim.recording.truth import load_truth
from fedsim.scenario import Scenario
from fedsim.training.accounting import spent
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.types import FedsimError

Honest = Callable[[], Message]
BIAS, FIRST = "head.output.bias", torch.tensor([0])
SECURE = {"none": [], "secure": [{"name": "aggregate"}]}


def tensors(message: Message) -> dict[str, torch.Tensor]:
    return wire.decode(message.content[wire.ARRAYS])  # type: ignore[arg-type]


def test_the_recording_is_what_crossed_the_wire_bit_for_bit(tmp_path: Path) -> None:
    sent: dict[int, dict[str, torch.Tensor]] = {}
    model: dict[str, torch.Tensor] = {}

    def spy(client: int, message: Message, honest: Honest) -> Message:
        reply = honest()
        sent[client] = tensors(reply)
        model.update(tensors(message))
        return reply

    wanted = scenario(
        defenses=TOPK,
        training__rounds=1,
        observe__clients="all",
    )
    train_with_fault(wanted, tmp_path, spy, "topk")
    for client in range(4):
        seen = observation(tmp_path, f"topk/round-0001/client-{client:04d}-training")
        assert same(dict(seen.update), sent[client])
        assert same(dict(seen.parameters), model)
        assert (seen.client, seen.round, seen.num_clients) == (client, 1, 1)
        assert seen.defense == ({"name": "top_k", "ratio": 0.1},)
    zeros = sum(int((t == 0).sum()) for t in sent[0].values())
    assert zeros >= 0.89 * sum(t.numel() for t in sent[0].values())


def _raise(client: int, message: Message, honest: Honest) -> Message:
    raise ValueError("no data\x1b[31m today")


def _slow(client: int, message: Message, honest: Honest) -> Message:
    reply = honest()
    local.time.sleep(0.6)  # on the test's clock
    return reply


def _honest(client: int, message: Message, honest: Honest) -> Message:
    return honest()


def _moved(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Fault:
    """Answers with another update than the client has computed."""

    def fault(client: int, message: Message, honest: Honest) -> Message:
        reply = honest()
        reply.content[wire.ARRAYS] = wire.encode(change(tensors(reply)))
        return reply

    return fault


def _scaled(factor: float) -> Fault:
    return _moved(lambda update: {name: factor * value for name, value in update.items()})


def _poison(value: float) -> Fault:
    return _moved(lambda update: {**update, BIAS: update[BIAS].index_fill(0, FIRST, value)})


def _says(**numbers: float) -> Fault:
    def fault(client: int, message: Message, honest: Honest) -> Message:
        reply = honest()
        told = {wire.EXAMPLES: 4, wire.LOSS: 1.0, **numbers}
        reply.content[wire.METRICS] = MetricRecord(told)
        return reply

    return fault


def _only(client: int, fault: Fault) -> Fault:
    return lambda who, message, honest: fault(who, message, honest) if who == client else honest()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_raise, "client_error"),
        (_slow, "late"),
        (_moved(lambda u: {n: v for n, v in u.items() if n != BIAS}), "malformed"),
        (_moved(lambda u: {n: v.double() for n, v in u.items()}), "malformed"),
        (_says(**{wire.EXAMPLES: 2**39}), "malformed"),
        (_poison(math.nan), "non_finite"),
        (_poison(math.inf), "non_finite"),
        (_says(**{wire.LOSS: math.nan}), "non_finite"),
    ],
)
def test_a_bad_answer_is_counted_and_left_out(
    fault: Fault, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch)
    wanted = scenario(federation={"timeout": 0.5}, training__rounds=1, observe__clients="all")
    (record,) = train_with_fault(wanted, tmp_path, _only(2, fault))
    expected = dict.fromkeys(REASONS, 0) | {reason: 1}
    assert record.failures == expected
    assert record.participants == (0, 1, 2, 3) and record.aggregated == 3
    assert len(record.details) == 1 and record.details[0].startswith(f"client 2: {reason}")
    assert record.details[0].isprintable()
    seen = [observation(tmp_path, f"none/round-0001/client-000{c}-training") for c in (0, 1, 3)]
    after, lr = final_model(tmp_path, wanted), wanted.training.local.lr
    for name, before in seen[0].parameters.items():
        mean = torch.stack([s.update[name] for s in seen]).mean(0)
        assert torch.allclose(after[name], before - lr * mean, atol=1e-7)
    recorded = (tmp_path / "observations/none/round-0001/client-0002-training.json").exists()
    assert recorded == (reason == "non_finite")  # the server did see those, and only those


def test_a_round_without_a_usable_update_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    calls = []

    def fail_in_round_one(client: int, message: Message, honest: Honest) -> Message:
        calls.append(client)
        return _raise(client, message, honest) if len(calls) <= 4 else honest()

    wanted = scenario(training__rounds=2)
    first, second = train_with_fault(wanted, tmp_path, fail_in_round_one)
    assert (first.aggregated, first.failures["client_error"], first.train_loss) == (0, 4, None)
    assert second.aggregated == 4
    seen = observation(tmp_path, "none/round-0002/client-0000-training")
    assert same(dict(seen.parameters), workload(wanted).initial()[0])


def test_a_zero_update_is_aggregated_and_counted(tmp_path: Path) -> None:
    wanted = scenario(training__rounds=1)
    (record,) = train_with_fault(wanted, tmp_path, _only(1, _scaled(0.0)))
    assert (record.aggregated, record.zero_updates) == (4, 1)
    assert not any(record.failures.values())


def test_an_aggregate_is_all_that_is_recorded(tmp_path: Path) -> None:
    """One mean per round, of those who answered, with their truth and nobody else's."""
    wanted = scenario(defenses={"secure": [{"name": "aggregate"}]}, training__rounds=1)
    (record,) = train_with_fault(wanted, tmp_path, _only(2, _poison(math.nan)), "secure")
    assert (record.aggregated, record.train_loss) == (3, None)
    files = sorted(p.name for p in (tmp_path / "observations").rglob("*") if p.is_file())
    assert files == [
        "aggregate-training.json",
        "aggregate-training.safetensors",
        "global.safetensors",
    ]
    assert not (tmp_path / "spool").exists() or not list((tmp_path / "spool").rglob("*.*"))
    seen = observation(tmp_path, "secure/round-0001/aggregate-training")
    assert (seen.client, seen.num_clients, seen.vantage) == (-1, 3, "aggregate")
    truth = load_truth(tmp_path, seen.id)
    assert len(truth.images) == seen.num_images == 12
    after = final_model(tmp_path, wanted, "secure")
    for name, before in seen.parameters.items():
        assert torch.equal(after[name], before - 0.1 * seen.update[name])


@pytest.mark.parametrize("stack", ["none", "secure", "topk"])
def test_probes_are_recorded_and_change_nothing(stack: str, tmp_path: Path) -> None:
    defenses = {**SECURE, **TOPK}
    plain = scenario(defenses=defenses)
    probed = scenario(
        defenses=defenses,
        observe={"rounds": [2], "clients": [0, 3], "batch_sizes": [1, 2], "trials": 2},
    )
    expected = results(train(plain, tmp_path / "plain", stack))
    assert results(train(probed, tmp_path / "probed", stack)) == expected
    assert same(
        final_model(tmp_path / "plain", plain, stack),
        final_model(tmp_path / "probed", probed, stack),
    )
    home = tmp_path / "probed" / "observations" / stack / "round-0002"
    who = ["aggregate"] if stack == "secure" else ["client-0000", "client-0003"]
    names = {f"{w}-b{size}-t{trial}" for w in who for size in (1, 2) for trial in (0, 1)}
    assert {path.stem for path in home.glob("*.json")} == names
    for name in names:
        seen = observation(tmp_path / "probed", f"{stack}/round-0002/{name}")
        assert len(load_truth(tmp_path / "probed", seen.id).images) == seen.num_images
    truths = (tmp_path / "probed" / "truth" / stack).glob("round-*/*")
    assert {path.name for path in truths} == names
    one, other = (
        observation(tmp_path / "probed", f"{stack}/round-0002/{who[0]}-b1-t{t}") for t in (0, 1)
    )
    assert not same(dict(one.update), dict(other.update))


def test_a_failing_probe_costs_a_recording_and_not_an_update(tmp_path: Path) -> None:
    def fail_probes(client: int, message: Message, honest: Honest) -> Message:
        is_probe = message.metadata.message_type == "train.probe"
        return (_raise if is_probe else _honest)(client, message, honest)

    wanted = scenario(observe={"rounds": [1], "clients": [0], "batch_sizes": [1]})
    records = train_with_fault(wanted, tmp_path, fail_probes)
    assert [record.probe_failures for record in records] == [1, 0, 0]
    assert all(record.aggregated == 4 for record in records)
    assert not any(any(record.failures.values()) for record in records)


class Backwards(LocalGrid):
    """Answers come in the opposite order, from nodes listed in the opposite order."""

    def get_node_ids(self) -> list[int]:
        return list(super().get_node_ids())[::-1]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        return super().pull_messages(list(message_ids)[::-1])


@pytest.mark.parametrize("stack", ["none", "secure"])
def test_the_order_of_answers_and_nodes_leaves_no_trace(stack: str, tmp_path: Path) -> None:
    wanted = scenario(
        defenses=SECURE,
        data__clients=7,
        federation={"strategy": "FedAdam"},
        training__local={"steps": 2, "batch_size": 4, "lr": 0.1},
    )
    forth = train_with_fault(wanted, tmp_path / "a", _honest, stack)
    back = train_with_fault(wanted, tmp_path / "b", _honest, stack, grid=Backwards)
    assert results(forth) == results(back)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("stack", ["none", "secure"])
def test_a_round_on_disk_is_a_round_in_memory(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scenario(defenses=SECURE)
    train(wanted, tmp_path / "memory", stack)
    monkeypatch.setattr(tap, "Spool", partial(Spool, budget=0))
    train(wanted, tmp_path / "disk", stack)
    with pytest.raises(FedsimError, match="FedAvg failed in round 1 on"):
        monkeypatch.setattr(FedAvg, "aggregate_train", _fail)
        train(wanted, tmp_path / "failed", stack)
    assert not list((tmp_path / "failed").glob(".spool*"))
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert not list((tmp_path / "disk").glob(".spool*"))


def test_probes_see_the_model_of_their_round(tmp_path: Path) -> None:
    """Batch norm's statistics too, though training has by then made new ones."""
    wanted = scenario(
        **BATCH_NORM,
        observe={"rounds": [2], "clients": [1], "batch_sizes": [3]},
    )
    train(wanted, tmp_path)
    seen = observation(tmp_path, "none/round-0002/client-0001-b3-t0")
    result = workload(wanted).client_update(
        1, 2, seen.parameters, seen.buffers, {}, probe=Probe(batch_size=3, trial=0)
    )
    assert same(dict(seen.update), dict(result.update.tensors))
    assert same(dict(seen.buffers_update), dict(result.update.buffers))


def test_batch_norm_statistics_are_averaged_whatever_the_strategy(tmp_path: Path) -> None:
    """FedAdam at this rate would drive a variance below zero."""
    wanted = scenario(
        **BATCH_NORM,
        federation={"strategy": "FedAdam", "strategy_parameters": {"eta": 1.0}},
        observe={"rounds": [1], "clients": "all"},
        training__rounds=2,
    )
    records = train(wanted, tmp_path)
    after = final_model(tmp_path, wanted)
    variances = [value for name, value in after.items() if name.endswith("running_var")]
    assert variances and all(bool((value > 0).all()) for value in variances)
    assert records[-1].test_loss is not None
    seen = observation(tmp_path, "none/round-0001/client-0000-training")
    assert any(name.endswith("running_var") for name in seen.buffers_update)
    assert any(name.endswith("num_batches_tracked") for name in seen.buffers)
    assert not any(name.endswith("num_batches_tracked") for name in seen.buffers_update)


def test_in_eval_mode_no_statistics_leave_the_client(tmp_path: Path) -> None:
    wanted = scenario(
        **BATCH_NORM,
        training__local={"steps": 1, "batch_size": 4, "lr": 0.1, "mode": "eval"},
    )
    train(wanted, tmp_path)
    seen = observation(tmp_path, "none/round-0003/client-0000-training")
    assert not seen.buffers_update and seen.buffers
    after, start = final_model(tmp_path, wanted), workload(wanted).initial()[1]
    assert all(torch.equal(after[n], b) for n, b in start.items() if b.is_floating_point())


def test_no_loss_is_reported_where_it_would_leak(tmp_path: Path) -> None:
    private = [CLIP, plugin("gaussian_noise", multiplier=1.0)]
    wanted = scenario(defenses={"private": private, "clipped": [CLIP]}, training__rounds=1)
    losses: dict[str, RoundRecord] = {
        stack: train(wanted, tmp_path, stack)[0] for stack in wanted.defenses
    }
    assert losses["private"].train_loss is None
    assert losses["clipped"].train_loss is not None


def test_evaluation_follows_the_scenario(tmp_path: Path) -> None:
    wanted = scenario(training={"rounds": 5, "evaluate_every": 2, "local": {"batch_size": 4}})
    records = train(wanted, tmp_path)
    assert [r.round for r in records if r.test_accuracy is not None] == [2, 4, 5]
    assert [r.round for r in records if r.test_loss is not None] == [2, 4, 5]


def test_sizes_on_the_wire_are_those_of_the_messages(tmp_path: Path) -> None:
    sizes: list[tuple[int, int]] = []

    def weigh(client: int, message: Message, honest: Honest) -> Message:
        reply = honest()
        sizes.append((size_of(message.content), size_of(reply.content)))
        return reply

    (record,) = train_with_fault(scenario(training__rounds=1), tmp_path, weigh)
    assert record.bytes_down == sum(down for down, _ in sizes)
    assert record.bytes_up == sum(up for _, up in sizes)
    floats = sum(value.numel() for value in workload(scenario()).initial()[0].values())
    assert 4 * floats < record.bytes_up / 4 < 4 * floats + 2000


def test_a_diverged_model_is_said_to_be_one(tmp_path: Path) -> None:
    wanted = scenario(training__local={"steps": 1, "batch_size": 4, "lr": 1e11})
    records = train(wanted, tmp_path)
    assert any(record.test_loss is None for record in records)
    assert any("diverged" in line for record in records for line in record.details)


def test_a_strategy_that_fails_is_named(tmp_path: Path) -> None:
    records = train(with_strategy("Bulyan", {"num_malicious_nodes": 2}), tmp_path)
    assert [record.aggregated for record in records] == [0, 0, 0]
    assert "Bulyan aggregates nothing" in records[0].details[0]
    name = "DifferentialPrivacyServerSideFixedClipping"
    parameters = {**STRATEGIES[name], "num_sampled_clients": 9}
    with pytest.raises(FedsimError, match="is 9, but a round samples 4 clients"):
        train(with_strategy(name, parameters), tmp_path / "dp")
    with pytest.raises(FedsimError, match="num_sampled_clients is 9"):
        check(workload(with_strategy(name, parameters)).server())


def test_clients_clip_to_the_norm_that_flower_sends(tmp_path: Path) -> None:
    """Flower 1.41 lowers the norm where all are clipped, by which they stay clipped."""
    name = "DifferentialPrivacyClientSideAdaptiveClipping"
    parameters = {**STRATEGIES[name], "noise_multiplier": 0.0, "initial_clipping_norm": 1e-3}
    wanted = with_strategy(
        name, parameters, training__algorithm="fedavg", observe__rounds=[1, 2, 3]
    )
    assert [record.aggregated for record in train(wanted, tmp_path)] == [4, 4, 4]
    seen = [observation(tmp_path, f"none/round-000{n}/client-0000-training") for n in (1, 2, 3)]
    lengths = [float(global_norm(each.update)) for each in seen]
    # A factor of exp(-rate (share - target)) a round; the share is of the clipped, in place of
    # those within the norm as in Andrew et al.
    falls = math.exp(-0.2 * (1 - 0.5))
    assert lengths == pytest.approx([1e-3, 1e-3 * falls, 1e-3 * falls**2], rel=1e-5)
    assert all(each.effect.scaled for each in seen)


def _budgeted(**changes: Any) -> Scenario:
    parameters = {
        "strategy": "FedAvg",
        "noise_multiplier": 1.0,
        "clipping_norm": 1.0,
        "num_sampled_clients": 4,
        "accountant": {"max_epsilon": 8.0, "delta": 1e-5},
    }
    name = "DifferentialPrivacyServerSideFixedClipping"
    return with_strategy(
        name, parameters, **{"training__rounds": 4, "observe__rounds": [1]} | changes
    )


def test_a_spent_budget_stops_training(tmp_path: Path) -> None:
    wanted = _budgeted()
    records = train(wanted, tmp_path)
    assert [record.aggregated for record in records] == [4, 4, 0, 0]
    assert [len(record.participants) for record in records] == [4, 4, 0, 0]
    assert [bool(record.details) for record in records] == [False, False, True, False]
    # Exact: the Gaussian mechanism of multiplier 1 / √2.
    exact = gaussian.epsilon(1 / math.sqrt(2), 1e-5)
    assert f"true ε = {exact:.4g}" in records[2].details[0] and exact < 8
    claim = spent(workload(wanted), 4)
    assert claim.claimed_epsilon == 8.0 and math.isinf(claim.epsilon)
    assert claim.reason and "after the server has seen each update" in claim.reason


def test_a_round_without_answers_spends_nothing_and_ends_no_run(tmp_path: Path) -> None:
    orders = iter(range(100))

    def silent_in_the_second(client: int, message: Message, honest: Honest) -> Message:
        return _raise(client, message, honest) if 4 <= next(orders) < 8 else honest()

    records = train_with_fault(_budgeted(), tmp_path, silent_in_the_second)
    assert [record.aggregated for record in records] == [4, 0, 4, 0]
    assert "2 rounds" in records[3].details[0]


def test_an_update_of_zero_ends_no_run(tmp_path: Path) -> None:
    wanted = _budgeted(training__rounds=1)
    records = train_with_fault(wanted, tmp_path, _only(2, _scaled(0.0)))
    assert [record.aggregated for record in records] == [0]
    assert "an update is zero" in records[0].details[0]


@pytest.mark.parametrize("reason", ["batch-norm statistics", "the mean image"])
def test_what_a_strategys_noise_leaves_out_has_no_finite_epsilon(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _budgeted(training__rounds=3)
    if reason == "the mean image":
        server = workload(wanted)
        told = replace(server.census, private_statistics={"client": (reason,)})
        object.__setattr__(server, "census", told)
        monkeypatch.setattr("federation_support.workload", lambda *_: server)
    else:
        monkeypatch.setattr(Server, "releases_statistics", True)
    records = train(wanted, tmp_path)
    assert "true ε = ∞, since" in records[2].details[0] and reason in records[2].details[0]


def test_a_deployed_strategys_noise_follows_from_no_seed_that_clients_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, models = _budgeted(training__rounds=1), []
    for number, secret in enumerate((None, 5, 5 + 2**63, 5)):
        server = workload(wanted)
        object.__setattr__(server, "noise_seed", secret)
        monkeypatch.setattr("federation_support.workload", lambda *_, server=server: server)
        train_with_fault(wanted, tmp_path / str(number), _honest)
        models.append(final_model(tmp_path / str(number), wanted))
    assert same(models[1], models[3])
    assert not any(same(models[one], models[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_noise_of_a_strategy_is_used_for_one_mean_only(tmp_path: Path) -> None:
    wanted = _budgeted(
        training__rounds=1, training__local={"steps": 1, "batch_size": 4, "lr": 1e-4}
    )
    for _ in range(2):
        train_with_fault(wanted, tmp_path, _honest)
        (tmp_path / "checkpoints" / "none.safetensors").unlink()
    with pytest.raises(FedsimError, match="the strategy has answered in round 1 for other values"):
        train_with_fault(wanted, tmp_path, _scaled(0.5))


def test_noise_of_the_server_is_used_for_one_sum_only(tmp_path: Path) -> None:
    """A round that is repeated with other answers would show their difference without noise."""
    stack = [CLIP, plugin("dp_ftrl", noise_multiplier=1.0)]
    wanted = scenario(training__rounds=1, defenses={"ftrl": stack})
    checkpoint = tmp_path / "checkpoints" / "ftrl.safetensors"
    for _ in range(2):
        (record,) = train_with_fault(wanted, tmp_path, _only(1, _raise), "ftrl")
        assert record.failures["client_error"] == 1, "the same sum, twice"
        checkpoint.unlink()
    with pytest.raises(FedsimError, match="the server has answered in round 1 for other values"):
        train_with_fault(wanted, tmp_path, _honest, "ftrl")
