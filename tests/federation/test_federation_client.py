"""Clients and their nodes: ids, paths, memory, isolation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import stopped
from federation_support import observation, scenario, train, workload
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedsim.federation import client_app, wire
from fedsim.federation.client_app import FederationJob
from fedsim.federation.client_state import ClientState
from fedsim.federation.delivery import Nodes, exchange
from fedsim.federation.local import LocalGrid, identity
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError

TOPK = {"topk": [{"name": "top_k", "parameters": {"ratio": 0.1}}]}

NOISY = {
    "noisy": [
        {"name": "clip", "parameters": {"norm": 1.0}},
        {"name": "gaussian_noise", "parameters": {"multiplier": 1.0}},
    ]
}


def ask(
    out: Path,
    *,
    client: object = 0,
    round: int = 1,
    probe: Probe | None = None,
    stack: str = "none",
    scale: float = 1.0,
    left_out: bool = False,
) -> Message:
    """What the client app answers to an order, or to the news that its answer was left out."""
    wanted = scenario(
        defenses={"none": [], "secure": [{"name": "aggregate"}], **TOPK, **NOISY},
        observe={"rounds": [1], "clients": [0, 1], "batch_sizes": [2]},
    )
    plan = workload(wanted, stack)
    job = FederationJob(scenario=wanted.model_dump_json(), stack=stack, out=str(out), threads=1)
    parameters, buffers = plan.initial()
    parameters = {name: scale * value for name, value in parameters.items()}
    content = wire.order(round, wire.encode(parameters), wire.encode(buffers), probe)
    context = Context(
        run_id=1,
        node_id=2,
        node_config={"partition-id": client},  # type: ignore[dict-item]
        state=RecordDict(),
        run_config={},
    )
    with identity():
        kind = "query.left_out" if left_out else "train.probe" if probe else "train"
        message = Message(content, 2, kind)
        return client_app.build(job, plan)(message, context)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        *(({"client": who}, "partition-id") for who in (-1, 4, "0", "../../etc", True, None, 1.0)),
        ({"round": 4}, "round 4 is past"),
        ({"probe": Probe(batch_size=3, trial=0)}, "no such probe is planned"),
        ({"probe": Probe(batch_size=2, trial=1)}, "no such probe is planned"),
        ({"round": 2, "probe": Probe(batch_size=2, trial=0)}, "no such probe is planned"),
    ],
)
def test_what_the_scenario_does_not_say_is_refused(
    order: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """A server cannot make a client compute, or write, what is not planned of it."""
    with pytest.raises(FedsimError, match=said):
        ask(tmp_path, **order)
    assert not list(tmp_path.iterdir())


def test_truth_stays_on_the_clients_side(tmp_path: Path) -> None:
    reply = ask(tmp_path, probe=Probe(batch_size=2, trial=0))
    assert set(reply.content) == {"arrays", "buffers", "metrics"}
    assert set(reply.content["metrics"]) == {"num-examples", "train_loss"}
    (written,) = (path for path in tmp_path.rglob("*") if path.is_file())
    place = "truth/none/round-0001/client-0000-b2-t0/client-0000.safetensors"
    assert written == tmp_path / place


def test_a_client_removes_the_truth_of_an_answer_that_was_left_out(tmp_path: Path) -> None:
    """Its own, and of that answer alone."""
    for client in (0, 1):
        ask(tmp_path, stack="secure", client=client, probe=Probe(batch_size=2, trial=0))
    folder = tmp_path / "truth/secure/round-0001/aggregate-b2-t0"
    assert {path.name for path in folder.iterdir()} == {f"client-000{c}.safetensors" for c in "01"}
    for probe in (None, Probe(batch_size=2, trial=0)):
        assert len(list(folder.iterdir())) == 2, "no answer to an order to train is recorded"
        ask(tmp_path, stack="secure", client=1, probe=probe, left_out=True)
    assert [path.name for path in folder.iterdir()] == ["client-0000.safetensors"]


@pytest.mark.parametrize("probe", [None, Probe(batch_size=2, trial=0)])
def test_no_noise_is_used_at_two_weights(probe: Probe | None, tmp_path: Path) -> None:
    """Of a resumed run whose rounds go otherwise, the difference of two answers has no noise."""
    first, again = (ask(tmp_path, stack="noisy", probe=probe) for _ in range(2))
    assert first.content["arrays"] == again.content["arrays"]
    with pytest.raises(FedsimError, match="its noise is not used twice"):
        ask(tmp_path, stack="noisy", probe=probe, scale=1.5)
    ask(tmp_path, stack="noisy", probe=probe, client=1, scale=1.5)
    for scale in (1.0, 1.5):
        ask(tmp_path, stack="none", probe=probe, scale=scale)


def test_a_damaged_note_of_used_noise_is_refused(tmp_path: Path) -> None:
    ask(tmp_path, stack="noisy")
    (path,) = tmp_path.rglob("answered.jsonl")
    path.write_text("{}\n")
    with pytest.raises(FedsimError, match="damaged"):
        ask(tmp_path, stack="noisy")


def test_a_probe_leaves_the_defenses_memory_alone(tmp_path: Path) -> None:
    ask(tmp_path, stack="topk", probe=Probe(batch_size=2, trial=0))
    assert not (tmp_path / "client_state").exists()
    ask(tmp_path, stack="topk")
    assert ClientState(tmp_path, "topk", 0).before(2)


def test_memory_of_a_client_is_that_of_its_last_round(tmp_path: Path) -> None:
    memory = ClientState(tmp_path, "s", 3)
    assert memory.before(1) == {}
    for round in (1, 2, 5):
        memory.save(round, {"x": torch.tensor(float(round))}, checkpoint_every=100)
    assert [float(memory.before(round)["x"]) for round in (2, 3, 5, 6)] == [1.0, 2.0, 2.0, 5.0]


@pytest.mark.parametrize(("every", "kept"), [(1, [6, 7]), (3, [6, 7]), (5, [5, 6, 7]), (9, None)])
def test_memory_is_kept_as_far_back_as_a_checkpoint_may_lie(
    every: int, kept: list[int] | None, tmp_path: Path
) -> None:
    memory = ClientState(tmp_path, "s", 0)
    for round in range(1, 8):
        memory.save(round, {"x": torch.zeros(1)}, every)
    found = [int(p.stem.removeprefix("round-")) for p in tmp_path.rglob("round-*")]
    assert sorted(found) == (kept or list(range(1, 8)))


def test_error_feedback_remembers_across_rounds(tmp_path: Path) -> None:
    """What top-k sends over all rounds plus its last memory is what the client computed."""
    wanted = scenario(defenses=TOPK, observe={"rounds": [1, 2, 3], "clients": [0]})
    train(wanted, tmp_path, "topk")
    plan = workload(wanted, "topk")
    memory: dict[str, torch.Tensor] = {}
    for round in (1, 2, 3):
        seen = observation(tmp_path, f"topk/round-000{round}/client-0000-training")
        result = plan.client_update(0, round, seen.parameters, seen.buffers, memory)
        assert all(torch.equal(seen.update[n], t) for n, t in result.update.tensors.items())
        memory = dict(result.state)
    stored = ClientState(tmp_path, "topk", 0).before(4)
    assert all(torch.equal(stored[name], value) for name, value in memory.items())


def grid(answer: Callable[[Message, Context], Message], timeout: float = 60.0) -> LocalGrid:
    app = ClientApp()
    app.train()(answer)
    app.query("identify")(answer)
    return LocalGrid(app, 3, timeout)


def messages(content: RecordDict) -> list[Message]:
    return [Message(content, node, "train") for node in (2, 3, 4)]


def test_clients_share_no_memory_with_the_server_or_each_other() -> None:
    def scribble(message: Message, context: Context) -> Message:
        message.content.array_records["arrays"].clear()
        context.state["mine"] = wire.encode({"x": torch.zeros(1)})
        return Message(RecordDict({"state": wire.encode({})}), reply_to=message)

    sent = RecordDict({"arrays": wire.encode({"x": torch.ones(2)})})
    with identity():
        local = grid(scribble)
        replies = local.send_and_receive(messages(sent))
    assert len(replies) == 3 and "x" in sent.array_records["arrays"]


def test_a_message_content_used_again_is_sent_as_it_is_then() -> None:
    """The messages of a round share theirs, and it is serialized once; the next round's is not."""
    seen = []

    def look(message: Message, context: Context) -> Message:
        seen.append(float(wire.decode(message.content["arrays"])["x"]))  # type: ignore[arg-type]
        return Message(RecordDict(), reply_to=message)

    content = RecordDict({"arrays": wire.encode({"x": torch.tensor(1.0)})})
    with identity():
        local = grid(look)
        local.send_and_receive(messages(content))
        content["arrays"] = wire.encode({"x": torch.tensor(2.0)})
        local.send_and_receive(messages(content))
    assert seen == [1.0] * 3 + [2.0] * 3


def test_one_clients_exception_is_its_own() -> None:
    def answer(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("broken client")
        return Message(RecordDict(), reply_to=message)

    with identity():
        replies = grid(answer).send_and_receive(messages(RecordDict()))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.reason == "RuntimeError: broken client"


def test_a_client_is_late_by_its_own_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients of 0.1 s each are not late at 0.2 s, one of 0.3 s is."""
    clock = stopped(monkeypatch)

    def answer(message: Message, context: Context) -> Message:
        clock.sleep(0.3 if context.node_config["partition-id"] == 1 else 0.1)
        return Message(RecordDict(), reply_to=message)

    with identity():
        local = grid(answer, timeout=0.2)
        found = dict(exchange(local, messages(RecordDict()), timeout=0.2))
    assert {position for position, reply in found.items() if reply is None} == {1}


def test_waiting_for_a_worker_makes_nobody_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker, three clients of 0.15 s: the last answers after 0.45 s, on time at 0.3 s."""
    clock = stopped(monkeypatch)

    class OneWorker(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
            return super().pull_messages(list(message_ids)[:1])

    def answer(message: Message, context: Context) -> Message:
        clock.sleep(0.15)
        return Message(RecordDict(), reply_to=message)

    app = ClientApp()
    app.train()(answer)
    with identity():
        found = list(exchange(OneWorker(app, 3, 60.0), messages(RecordDict()), timeout=0.3))
    assert len(found) == 3 and all(reply is not None for _, reply in found)


def test_silence_makes_an_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch)

    class Silent(LocalGrid):
        def pull_messages(self, message_ids: object) -> object:  # type: ignore[override]
            return []

    with identity():
        silent = Silent(ClientApp(), 3, 60.0)
        found = list(exchange(silent, messages(RecordDict()), timeout=0.1))
    assert found == [(0, None), (1, None), (2, None)]


def test_nodes_are_told_apart_by_what_they_say() -> None:
    def reversed_ids(message: Message, context: Context) -> Message:
        return Message(
            wire.identity(2 - int(context.node_config["partition-id"])), reply_to=message
        )

    def all_the_same(message: Message, context: Context) -> Message:
        return Message(wire.identity(0), reply_to=message)

    with identity():
        nodes = Nodes(grid(reversed_ids), 3)
        nodes.gather(0)
        assert nodes.by_client == {0: 4, 1: 3, 2: 2}
        with pytest.raises(FedsimError, match="two nodes say that they are client 0"):
            Nodes(grid(all_the_same), 3).gather(0)
