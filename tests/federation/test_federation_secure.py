"""Secure sums in a federation: what is aggregated, what the server sees, who is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import (
    CLIP,
    contents,
    final_model,
    observation,
    plugin,
    same,
    scenario,
    train,
    train_with_fault,
    workload,
)
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsim.federation import client_app, wire
from fedsim.federation.client_app import FederationJob
from fedsim.federation.local import LocalGrid, identity
from fedsim.federation.secure_aggregation import messages, plan
from fedsim.federation.secure_aggregation.client import STAGES
from fedsim.recording.truth import count, load_truth
from fedsim.scenario import Scenario
from fedsim.types import FedsimError, GroundTruth

SECURE = plugin("secure_aggregation")
STACKS = {
    "none": [],
    "plain": [CLIP, plugin("aggregate")],
    "secure": [CLIP, SECURE],
    "noisy": [CLIP, plugin("secure_aggregation", noise_multiplier=0.5)],
}
UNBOUNDED = plugin("secure_aggregation", range=1.0, noise_multiplier=1.0)
QUIET = plugin("secure_aggregation", noise_multiplier=1e-9)
PROBES = {"rounds": ["last"], "clients": [0], "batch_sizes": [1, 2], "trials": 2}


CONVNET = {
    "model": {"name": "convnet", "parameters": {"width": 4, "norm": "batch"}},
    "data__source": {"name": "digits", "parameters": {"size": 16}},
}


def secure(**changes: Any) -> Scenario:
    return scenario(**{"defenses": STACKS, "training__rounds": 2, **changes})


def stages(message: Message) -> str:
    return message.metadata.message_type.removeprefix("train.")


def test_the_mean_is_that_of_aggregate_to_a_millionth_of_the_clip_range(tmp_path: Path) -> None:
    """30 bits a client: four of them."""
    wanted = secure()
    plain, hidden = (tmp_path / stack for stack in ("plain", "secure"))
    records = [train(wanted, out, out.name) for out in (plain, hidden)]
    one, other = final_model(plain, wanted, "plain"), final_model(hidden, wanted, "secure")
    lr, rounds = 0.1, 2
    for name, value in one.items():
        assert float((value.double() - other[name].double()).abs().max()) <= 1e-6 * lr * rounds
    assert not same(one, final_model_at_start(wanted))
    for record in records[1]:
        assert record.aggregated == 4 and sum(record.failures.values()) == 0
        assert record.train_loss is None
        assert record.bytes_up <= 1.5 * records[0][0].bytes_up  # of a tiny model: mostly keys


def final_model_at_start(wanted: Scenario) -> dict[str, torch.Tensor]:
    parameters, buffers = workload(wanted, "plain").initial()
    return {**parameters, **wire.floating(buffers)}


def test_batch_norm_and_closed_forms_go_through_it_too(tmp_path: Path) -> None:
    ranged = plugin("secure_aggregation", buffer_range=50.0)
    wanted = secure(defenses={**STACKS, "secure": [CLIP, ranged]}, **CONVNET)
    for stack in ("plain", "secure"):
        train(wanted, tmp_path / stack, stack)
    one, other = (final_model(tmp_path / stack, wanted, stack) for stack in ("plain", "secure"))
    assert any("running" in name for name in one)
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("stack", "changes", "message"),
    [
        ([SECURE], {}, "nothing bounds an update's entries"),
        ([CLIP, SECURE], CONVNET, "give buffer_range"),
        ([CLIP, SECURE], {"data__clients": 1}, "two or more take part"),
        ([UNBOUNDED], {}, "put clip directly before it"),
        ([CLIP, QUIET], {}, "a client's noise of"),
    ],
)
def test_what_cannot_work_is_refused_before_any_round(
    stack: list[dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedsimError, match=message):
        plan.check(workload(secure(defenses={"none": [], "secure": stack}, **changes), "secure"))


def test_what_is_recorded_is_masked_or_the_sum(tmp_path: Path) -> None:
    wanted = secure(observe=PROBES)
    for stack in ("plain", "secure"):
        train(wanted, tmp_path, stack)
    for size in (1, 2):
        for trial in range(2):
            probe = f"b{size}-t{trial}"
            ideal = observation(tmp_path, f"plain/round-0002/aggregate-{probe}")
            sum = observation(tmp_path, f"secure/round-0002/aggregate-{probe}")
            masked = observation(tmp_path, f"secure/round-0002/client-0000-{probe}")
            assert (sum.vantage, masked.vantage) == ("aggregate", "server")
            assert (sum.num_clients, masked.num_clients) == (4, 1)
            assert sum.effect.known and not masked.effect.known
            for name, value in ideal.update.items():
                assert float((value - sum.update[name]).abs().max()) <= 1e-6
            flat = torch.cat([value.flatten() for value in masked.update.values()])
            # A uniform draw over four clients' range of [-1, 1] and a half of it more.
            assert float(flat.std()) == pytest.approx(8 / math.sqrt(12), rel=0.1)
            assert isinstance(load_truth(tmp_path, masked.id, 1), GroundTruth)
            assert count(tmp_path, sum.id) == 4
    listed = {each.id for each in workload(wanted, "secure").server().recordings()}
    there = {
        str(path.relative_to(tmp_path / "observations").with_suffix(""))
        for path in (tmp_path / "observations" / "secure").rglob("*.json")
    }
    assert there == listed


def test_nothing_of_one_client_crosses_the_wire_but_masked(tmp_path: Path) -> None:
    """The clients' true updates are sought in all that they send, and their counts and losses."""
    wanted = secure()
    sent: list[tuple[str, int, RecordDict]] = []
    own = workload(wanted, "secure")

    def listen(client: int, message: Message, honest: Callable[[], Message]) -> Message:
        reply = honest()
        sent.append((stages(message), client, reply.content))
        return reply

    train_with_fault(wanted, tmp_path, listen, "secure")
    assert [stage for stage, *_ in sent[:20]] == [stage for stage in STAGES for _ in range(4)]
    parameters, buffers = own.initial()
    result = own.client_update(1, 1, parameters, buffers, {})
    flat = torch.cat([value.flatten() for value in result.update.tensors.values()])
    content = next(c for stage, client, c in sent if stage == "masked" and client == 1)
    assert set(content) == {wire.ARRAYS, wire.CONFIG}
    vector, _ = messages.read_masked(content, len(flat) + 1, 32)
    correlation = torch.corrcoef(
        torch.stack([torch.from_numpy(vector[:-1].view("int32").copy()).double(), flat.double()])
    )[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(len(flat))


@pytest.mark.parametrize(
    ("stage", "mode", "reason"),
    [
        *((stage, "raises", "client_error") for stage in STAGES),
        ("keys", "empty", "malformed"),
        ("masked", "empty", "malformed"),
    ],
)
def test_who_is_lost_in_a_stage_is_left_out_and_the_run_goes_on(
    tmp_path: Path, stage: str, mode: str, reason: str
) -> None:
    def fault(number: int, message: Message, honest: Callable[[], Message]) -> Message:
        if number != 2 or stages(message) != stage:
            return honest()
        if mode == "raises":
            raise RuntimeError("gone")
        reply = honest()
        reply.content = RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 1})})
        return reply

    records = train_with_fault(secure(), tmp_path, fault, "secure")
    assert len(records) == 2
    for record in records:
        in_sum = 4 if stage in ("agree", "unmask") else 3
        assert record.aggregated == in_sum
        assert sum(record.failures.values()) == 4 - in_sum
        assert record.failures[reason] == 4 - in_sum
        assert any("client 2" in line for line in record.details)


@pytest.mark.parametrize("stage", ["keys", "masked", "unmask"])
def test_too_few_open_nothing_and_the_model_stays(tmp_path: Path, stage: str) -> None:
    def fault(number: int, message: Message, honest: Callable[[], Message]) -> Message:
        if number < 2 and stages(message) == stage:
            raise RuntimeError("gone")
        return honest()

    wanted = secure(observe=PROBES)
    for record in train_with_fault(wanted, tmp_path, fault, "secure"):
        assert record.aggregated == 0
        assert sum(record.failures.values()) == 4
        assert stage != "masked" or record.failures["too_few"] == 2
    assert same(final_model(tmp_path, wanted, "secure"), final_model_at_start(wanted))


def test_a_sum_that_counts_more_than_there_can_be_is_not_used(tmp_path: Path) -> None:
    """Client 2 sends noise, which nobody can tell from a masked vector; the run goes on."""

    def fault(number: int, message: Message, honest: Callable[[], Message]) -> Message:
        reply = honest()
        if number == 2 and stages(message) == "masked":
            vector = wire.decode(wire.arrays_of(reply.content, wire.ARRAYS))["vector"]
            vector = vector + torch.randint(2**20, 2**30, vector.shape, dtype=torch.int32)
            reply.content[wire.ARRAYS] = wire.encode({"vector": vector})
        return reply

    wanted = secure(observe=PROBES)
    for record in train_with_fault(wanted, tmp_path, fault, "secure"):
        assert record.aggregated == 0
        assert record.failures["malformed"] == sum(record.failures.values()) == 4
        assert any("says that it is of" in line for line in record.details)
    assert same(final_model(tmp_path, wanted, "secure"), final_model_at_start(wanted))
    assert not list((tmp_path / "observations").rglob("aggregate-*"))


@pytest.mark.parametrize(
    "change",
    [
        {"defenses": {**STACKS, "secure": [CLIP, plugin("secure_aggregation", range=1e12)]}},
        {"training__local": {"lr": 1e-12}},
        {"observe": PROBES},
    ],
)
def test_clients_that_were_shown_different_scenarios_are_in_no_sum(change: dict[str, Any]) -> None:
    """Others whose numbers are all 0 would leave one client's update alone in the sum."""
    one, other = (plan.terms(workload(w, "secure"), 1) for w in (secure(), secure(**change)))
    assert one.participants == other.participants
    assert one.session != other.session


def test_a_server_that_shows_one_client_another_model_opens_nothing(tmp_path: Path) -> None:
    def fault(number: int, message: Message, honest: Callable[[], Message]) -> Message:
        if number == 1 and stages(message) == "masked":
            shown = wire.decode(message.content[wire.ARRAYS])
            moved = {name: value + 1 for name, value in shown.items()}
            message.content[wire.ARRAYS] = wire.encode(moved)
        return honest()

    records = train_with_fault(secure(), tmp_path, fault, "secure")
    assert [record.aggregated for record in records] == [0, 0]
    assert any("has not signed the model" in line for line in records[0].details)


def test_a_killed_round_is_repeated_to_the_same_bytes(tmp_path: Path) -> None:
    wanted = secure()
    train(wanted, tmp_path / "whole", "secure")

    def fault(number: int, message: Message, honest: Callable[[], Message]) -> Message:
        round = wire.integer(wire.config_of(message.content), wire.ROUND, 1)
        if round == 2 and number == 3 and stages(message) == "unmask":
            raise KeyboardInterrupt
        return honest()

    with pytest.raises(KeyboardInterrupt):
        train_with_fault(wanted, tmp_path / "again", fault, "secure")
    train(wanted, tmp_path / "again", "secure", resume=True)
    for part in ("checkpoints", "observations", "truth"):
        assert contents(tmp_path / "again" / part) == contents(tmp_path / "whole" / part)


class _Clients:
    """The ClientApps of a secure stack, to be asked by hand."""

    def __init__(self, wanted: Scenario, out: Path, stack: str = "secure") -> None:
        self.own = workload(wanted, stack)
        job = FederationJob(scenario=wanted.model_dump_json(), stack=stack, out=str(out))
        self.grid = LocalGrid(client_app.build(job, self.own), wanted.data.clients, 60)

    def ask(self, client: int, action: str, content: RecordDict) -> Message:
        message = Message(content, list(self.grid.get_node_ids())[client], f"train{action}")
        (reply,) = self.grid.send_and_receive([message])
        return reply


def test_a_server_cannot_ask_for_the_update_as_it_is(tmp_path: Path) -> None:
    with identity():
        clients = _Clients(secure(observe=PROBES), tmp_path)
        parameters, buffers = clients.own.initial()
        for action, probe in (("", None), (".probe", clients.own.plan(2).probes[0])):
            order = wire.order(
                1 if probe is None else 2, wire.encode(parameters), wire.encode(buffers), probe
            )
            reply = clients.ask(0, action, order)
            assert reply.has_error() and "releases masked ones alone" in reply.error.reason


def test_a_stack_without_secure_sums_answers_none_of_their_orders(tmp_path: Path) -> None:
    with identity():
        clients = _Clients(secure(), tmp_path, "plain")
        for action in STAGES:
            reply = clients.ask(0, f".{action}", messages.table(1, {}))
            assert reply.has_error() and "no secure sums" in reply.error.reason


def test_a_round_is_opened_for_one_set_of_clients(tmp_path: Path) -> None:
    """Cohort differencing: the server repeats a round without client 3, to see what it sent."""
    with identity():
        clients = _Clients(secure(), tmp_path)
        own = clients.own
        parameters, buffers = own.initial()

        def open_for(survivors: set[int]) -> list[Message]:
            empty = messages.table(1, {})
            keys: dict[int, bytes] = {}
            for client in range(4):
                keys |= messages.read_table(clients.ask(client, ".keys", empty).content)
            shared = messages.table(1, keys)
            boxes = {
                client: messages.read_table(clients.ask(client, ".shares", shared).content)
                for client in range(4)
            }
            signatures = {}
            for client in survivors:
                mine = {sender: boxes[sender][client] for sender in range(4) if sender != client}
                order = messages.model_order(
                    messages.table(1, mine),
                    wire.encode(parameters),
                    wire.encode(wire.floating(buffers)),
                    None,
                )
                answer = clients.ask(client, ".masked", order)
                signatures[client] = bytes(wire.config_of(answer.content)["signature"])  # type: ignore[arg-type]
            lists = messages.table(1, signatures, lost=set(range(4)) - survivors)
            return [clients.ask(client, ".agree", lists) for client in sorted(survivors)]

        assert not any(reply.has_error() for reply in open_for({0, 1, 2, 3}))
        for reply in open_for({0, 1, 2}):
            assert reply.has_error() and "not used twice" in reply.error.reason
        assert not any(reply.has_error() for reply in open_for({0, 1, 2, 3}))


def test_noise_of_the_clients_has_the_deviation_that_is_claimed(tmp_path: Path) -> None:
    """Four clients' noise, of which two thirds suffice: 0.5 C sqrt(3 / 2), over the four asked."""
    wanted = secure()
    train(wanted, tmp_path / "quiet", "secure")
    train(wanted, tmp_path / "noisy", "noisy")
    one = observation(tmp_path / "quiet", "secure/round-0001/aggregate-training")
    other = observation(tmp_path / "noisy", "noisy/round-0001/aggregate-training")
    moved = torch.cat([(other.update[n] - one.update[n]).flatten() for n in one.update])
    assert float(moved.std()) == pytest.approx(0.5 * math.sqrt(1.5) / 4, rel=0.1)


def test_secrets_lie_in_a_file_of_the_owner_and_are_gone_at_the_end(tmp_path: Path) -> None:
    modes: list[int] = []
    path = tmp_path / "client_state" / "secure" / "client-0000" / "sum.json"

    def listen(client: int, message: Message, honest: Callable[[], Message]) -> Message:
        reply = honest()
        if client == 0 and stages(message) == "masked":
            modes.append(path.stat().st_mode & 0o777)
            memory = json.loads(path.read_text())["memory"]
            assert memory["held"] and not memory["secrets"]
        return reply

    train_with_fault(secure(), tmp_path, listen, "secure")
    assert set(modes) == {0o600}
    memory = json.loads(path.read_text())["memory"]
    assert not memory["secrets"] and not memory["held"]


MALFORMED = [
    RecordDict(),
    RecordDict({wire.CONFIG: ConfigRecord({})}),
    *(
        RecordDict({wire.CONFIG: ConfigRecord(given)})
        for given in (
            {wire.ROUND: 0},
            {wire.ROUND: 99},
            {wire.ROUND: 1, "clients": [0], "contents": [1]},
            {wire.ROUND: 1, "clients": [0, 0], "contents": [b"", b""]},
            {wire.ROUND: 1, "clients": [-1], "contents": [b""]},
        )
    ),
    RecordDict({wire.CONFIG: ConfigRecord({wire.ROUND: 1}), wire.ARRAYS: ArrayRecord()}),
]


@pytest.mark.parametrize("action", [".shares", ".masked", ".agree", ".unmask"])
def test_malformed_orders_are_refused(tmp_path: Path, action: str) -> None:
    known = ("MalformedError", "AbortedError", "FedsimError")
    with identity():
        clients = _Clients(secure(), tmp_path)
        for content in MALFORMED:
            reply = clients.ask(0, action, content)
            assert reply.has_error()
            assert any(name in reply.error.reason for name in known), reply.error.reason
