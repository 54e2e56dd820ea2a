"""Clients and their nodes: ids, paths, memory, isolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import CLIP, TOPK, observation, plugin, scenario, train, workload
from flwr.app import Context, Message, RecordDict

from fedsim.federation import client_app, wire
from fedsim.federation.client_app import FederationJob
from fedsim.federation.client_state import ClientState
from fedsim.federation.local import identity
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError

NOISY = {"noisy": [CLIP, plugin("gaussian_noise", multiplier=1.0)]}


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
    job = FederationJob(scenario=wanted.model_dump_json(), stack=stack, out=str(out))
    parameters, buffers = plan.initial()
    parameters = {name: scale * value for name, value in parameters.items()}
    content = wire.order(round, wire.encode(parameters), wire.encode(buffers), probe)
    node: Any = {"partition-id": client}
    context = Context(run_id=1, node_id=2, node_config=node, state=RecordDict(), run_config={})
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


@pytest.mark.parametrize(("every", "kept"), [(1, [6, 7]), (3, [6, 7]), (5, [5, 6, 7]), (9, None)])
def test_memory_is_kept_as_far_back_as_a_checkpoint_may_lie(
    every: int, kept: list[int] | None, tmp_path: Path
) -> None:
    memory = ClientState(tmp_path, "s", 0)
    for round in range(1, 8):
        memory.save(round, {"x": torch.zeros(1)}, every)
    found = [int(p.stem.removeprefix("round-")) for p in tmp_path.rglob("round-*")]
    assert sorted(found) == (kept or list(range(1, 8)))


def test_memory_of_a_client_is_that_of_its_last_round(tmp_path: Path) -> None:
    memory = ClientState(tmp_path, "s", 3)
    assert memory.before(1) == {}
    for round in (1, 2, 5):
        memory.save(round, {"x": torch.tensor(float(round))}, checkpoint_every=100)
    assert [float(memory.before(round)["x"]) for round in (2, 3, 5, 6)] == [1.0, 2.0, 2.0, 5.0]


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
