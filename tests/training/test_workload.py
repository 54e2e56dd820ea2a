"""A stack's computations: pure, paired across stacks, refused before work, and walled off."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_scenario
from torch import Tensor

from fedsim.federation import refusals, server_app
from fedsim.federation.checkpoint import Checkpoint, Checkpoints
from fedsim.recording.files import observation_id, write_tensors
from fedsim.scenario import Scenario
from fedsim.scenario.resolve import resolve
from fedsim.training import accounting
from fedsim.training.schedule import Probe
from fedsim.training.server import Server
from fedsim.training.source import load_dataset
from fedsim.training.spending import Account
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError, Table, Tensors

BASE: dict[str, Any] = {
    "name": "tiny",
    "seed": 3,
    "data": {"source": "digits", "clients": 5},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 4, "local": {"batch_size": 6, "lr": 0.2}},
    "federation": {"participation": 0.6},
    "defenses": {
        "none": [],
        "noise": [{"name": "gaussian_noise", "std": 0.1}],
        "topk": [{"name": "top_k", "ratio": 0.1}],
        "local": [{"name": "local_aggregation", "steps": 3, "batches": "different"}],
        "sum": ["aggregate"],
    },
    "attacks": [],
    "observe": {"clients": [0], "batch_sizes": [1, 3], "trials": 2},
}


def scenario(**changes: Any) -> Scenario:
    return resolve({**BASE, **changes})


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    resolved = scenario()
    dataset = load_dataset(resolved)
    return {name: Workload(resolved, name, dataset) for name in resolved.defenses}


def equal(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_an_update_is_a_pure_function(workloads: dict[str, Workload]) -> None:
    for name, workload in workloads.items():
        parameters, buffers = workload.initial()
        kept = {n: t.clone() for n, t in parameters.items()}
        first = workload.client_update(1, 2, parameters, buffers, {})
        torch.manual_seed(99)
        second = workload.client_update(1, 2, parameters, buffers, {})
        assert equal(first.update.tensors, second.update.tensors), name
        assert equal(parameters, kept), name
        other = workload.client_update(1, 3, parameters, buffers, {})
        assert not equal(first.update.tensors, other.update.tensors), name


def test_the_truth_is_what_was_trained_on(workloads: dict[str, Workload]) -> None:
    workload = workloads["local"]
    parameters, buffers = workload.initial()
    truth = workload.client_update(2, 1, parameters, buffers, {}).truth
    assert len(truth.images) == 3 * 6  # a batch of its own in each of the three steps
    stored = workload.dataset.train_images[workload.parts[2]]
    own = {image.numpy().tobytes() for image in stored}
    used = (truth.images * 255).round().to(torch.uint8)
    assert torch.equal(used.float() / 255, truth.images)
    assert all(image.numpy().tobytes() in own for image in used)


def test_a_probe_leaves_no_trace(workloads: dict[str, Workload]) -> None:
    workload = workloads["topk"]
    parameters, buffers = workload.initial()
    state = workload.client_update(0, 1, parameters, buffers, {}).state
    assert state
    probed = workload.client_update(
        0, 2, parameters, buffers, state, probe=Probe(batch_size=3, trial=0)
    )
    assert equal(probed.state, state)
    trained = workload.client_update(0, 2, parameters, buffers, state)
    assert not equal(trained.state, state)


def test_what_is_observed(workloads: dict[str, Workload]) -> None:
    plain, summed = workloads["none"].plan, workloads["sum"].plan
    assert plain(3).observed == plain(3).probes == ()
    assert plain(4).observed == (0,) and summed(4).observed == summed(4).participants
    assert plain(4) is plain(4), "a round's plan is made once"
    probes = plain(4).probes
    assert [(p.batch_size, p.trial) for p in probes] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    name = workloads["none"]._observation_id(4, 0, probes[2])
    assert name == observation_id("none", 4, 0, "b3-t0")


def test_an_observation_declares_the_probe_and_not_the_truth(
    workloads: dict[str, Workload],
) -> None:
    workload = workloads["local"]
    parameters, buffers = workload.initial()
    probe = Probe(batch_size=3, trial=1)
    result = workload.client_update(0, 4, parameters, buffers, {}, probe=probe)
    seen = workload.observation(4, 0, result.update, parameters, buffers, probe=probe)
    assert seen.training.batch_size == 3 and seen.num_images == 9 == len(result.truth.images)
    assert seen.training.algorithm == "fedavg" and seen.defense[0]["name"] == "local_aggregation"


def test_evaluation_against_a_loop_by_hand(workloads: dict[str, Workload]) -> None:
    workload = workloads["none"]
    parameters, buffers = workload.initial()
    found = workload.computation.evaluate(parameters, buffers)
    data = workload.dataset
    mean, std = torch.tensor(data.mean), torch.tensor(data.std)
    inputs = (data.test_images.float() / 255 - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
    workload.model.load_state_dict(parameters)
    with torch.no_grad():
        logits = workload.model.eval()(inputs)
    expected = torch.nn.functional.cross_entropy(logits, data.test_labels)
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    assert found.accuracy == pytest.approx(
        float((logits.argmax(1) == data.test_labels).float().mean())
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"local": {"batch_size": 5000}}}, "at least 5,000 images"),
        (
            {"observe": {"clients": [0], "batch_sizes": [1, 4000]}},
            "observe.batch_sizes: a batch of 4000",
        ),
        (
            {
                "observe": {"clients": [0], "rounds": [1, 2, 3, 4]},
                "federation": {"participation": 0.2},
            },
            "observe.clients: none of them takes part in round",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    resolved = scenario(**changes)
    with pytest.raises(FedsimError, match=message):
        refusals.check(Workload(resolved, "none"))


def test_training_starts_from_given_weights(tmp_path: Path) -> None:
    """From a state dict, and from what another run left as its checkpoint."""
    model = {"name": "convnet", "width": 2, "norm": "batch"}
    trained = Workload(scenario(model=model), "none")
    parameters = {name: value + 1 for name, value in trained.initial()[0].items()}
    buffers = trained.initial()[1]
    write_tensors(tmp_path / "plain.safetensors", {**parameters, **buffers})
    aggregated = {name: value for name, value in buffers.items() if value.is_floating_point()}
    assert len(aggregated) < len(buffers), "counters of batch norm are never released"
    Checkpoints(tmp_path, trained.scenario, "none").save(
        Checkpoint(
            round=4, parameters=parameters, buffers=aggregated, strategy={}, strategy_tensors={}
        )
    )
    for path in ("plain.safetensors", "checkpoints/none.safetensors"):
        training = {**BASE["training"], "weights": str(tmp_path / path)}
        workload = Workload(scenario(model=model, training=training), "none")
        refusals.check(workload)
        found = workload.initial()
        assert found[0].keys() == parameters.keys()
        assert found[1].keys() == buffers.keys()
        for name, value in (found[0] | found[1]).items():
            assert torch.equal(value, {**parameters, **buffers}[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.popitem() and t, "no tensor"),
        (lambda t: {n: v[..., :1] for n, v in t.items()}, "the scenario's model has"),
        (lambda t: {n: v / 0 for n, v in t.items()}, "not finite"),
        (None, "cannot be read as safetensors"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None, message: str
) -> None:
    path = tmp_path / "weights.safetensors"
    if change:
        tensors = dict(Workload(scenario(), "none").initial()[0])
        write_tensors(path, {n: v.contiguous() for n, v in change(tensors).items()})
    workload = Workload(scenario(training={**BASE["training"], "weights": str(path)}), "none")
    with pytest.raises(FedsimError, match=rf"^training\.weights: .*{message}"):
        refusals.check(workload)


def test_participations_of_two_clients_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client in three plain rounds, another in the one that is asked again, is not both."""
    observe = {"rounds": [2], "batch_sizes": [1], "releases": 4}
    workload = Workload(
        scenario(training={**BASE["training"], "rounds": 5}, observe=observe), "none"
    )
    taken = {(1, 3, 4), (2,), (1,), (2, 5)}
    monkeypatch.setattr(Account, "participations", lambda _, __: taken)
    most = accounting.account_of(workload).most(5)
    assert [(m.trained, m.repeated) for m in most] == [(3, 0)], "probes repeat, and not training"
    once = Workload(scenario(training={**BASE["training"], "rounds": 5}), "none")
    taken = {(1, 3, 4), (2,)}
    most = accounting.account_of(once).most(5)
    assert [(m.trained, m.repeated) for m in most] == [(3, 0)]


def test_a_client_trains_on_the_candidates_that_its_coins_say_and_no_others() -> None:
    observe = {"clients": "all", "candidates": 100}
    own = Workload(scenario(observe=observe, attacks=["update_membership"]), "none")
    plain = Workload(scenario(), "none")
    for client, before in zip(own.clients, plain.parts, strict=True):
        split = client.candidates
        assert split is not None
        members, others = split.examples[split.members], split.examples[~split.members]
        assert len(members) and len(others) and not torch.isin(others, client.own).any()
        assert torch.isin(members, client.own).all()
        # All that is no candidate stays with the client.
        assert len(client.own) == len(before) - len(others)


IMAGES = tiny_scenario(seed=3, data__clients=3, training__rounds=2)
ROWS: dict[str, Any] = {
    "name": "rows",
    "seed": 3,
    "data": {"source": "diabetes", "clients": 3},
    "learner": {"name": "least_squares", "method": "ols"},
    "training": {"rounds": 1},
    "defenses": {"none": []},
    "attacks": [],
}


def reachable(root: object) -> Iterator[object]:
    """Everything that `root` leads to, but for modules and classes."""
    seen, waiting = {id(root)}, [root]
    while waiting:
        one = waiting.pop()
        yield one
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, (type, type(gc))):
                seen.add(id(other))
                waiting.append(other)


def held(root: object, training: Tensor) -> list[object]:
    """What of `training` the object `root` leads to."""
    pointer = training.untyped_storage().data_ptr()
    found: list[object] = []
    for one in reachable(root):
        if isinstance(one, Tensor) and one.numel():
            if one.untyped_storage().data_ptr() == pointer:
                found.append(one)
        elif (isinstance(one, Dataset) and len(one.train_images)) or (
            isinstance(one, Table) and len(one.train_rows)
        ):
            found.append(one)
    return found


@pytest.mark.parametrize("document", [IMAGES, ROWS], ids=["images", "rows"])
def test_a_server_leads_to_no_training_example(document: dict[str, Any]) -> None:
    workload = Workload(resolve(document), "none")
    data = workload.dataset
    training = data.train_images if isinstance(data, Dataset) else data.train_rows
    assert held(workload, training)
    server = workload.server()
    assert type(server) is Server
    assert not held(server, training)


def test_the_engine_hands_the_server_app_no_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from fedsim.federation import federate

    handed: list[object] = []
    build = server_app.build

    def watched(server: Server, *others: Any) -> Any:
        handed.append(server)
        return build(server, *others)

    monkeypatch.setattr(server_app, "build", watched)
    federate(resolve(IMAGES), "none", tmp_path, resume=False, on_round=lambda _: None)
    assert [type(one) for one in handed] == [Server]


@pytest.mark.parametrize("document", [IMAGES, ROWS], ids=["images", "rows"])
def test_nothing_of_a_federation_can_be_overwritten(document: dict[str, Any]) -> None:
    """Another federation, or another client, is made: none becomes another one."""
    workload = Workload(resolve(document), "none")
    for one in (workload, workload.server(), workload.clients[0]):
        public = {name for name in dir(one) if not name.startswith("_")}
        assert {"dataset", "seed", "scenario"} & public
        for name in public | {"more"}:
            with pytest.raises((AttributeError, TypeError)):
                setattr(one, name, None)
            with pytest.raises((AttributeError, TypeError)):
                delattr(one, name)
    assert isinstance(workload.clients, tuple)
