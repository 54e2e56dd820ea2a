"""EVALUATION rules 3, 4 and 5: what an attack is not granted, it does not get."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedsim.attacking.knowledge import hand_over, questions
from fedsim.attacking.question import Public
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.models.victim import rebuild
from fedsim.recording.files import load_observation, save_observation
from fedsim.recording.truth import save_truth
from fedsim.scenario.resolve import resolve
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.training.workload import Workload
from fedsim.types import GroundTruth, LocalTraining, Mode, Observation
from fedsim_attacks.gradient_matching._matching import Candidate, Matching, squared_distance
from fedsim_attacks.membership.property_inference import PropertyInference

SCENARIO: dict[str, Any] = {
    "name": "knowledge",
    "seed": 3,
    "data": {"source": {"name": "digits", "size": 12}, "clients": 4},
    "model": {"name": "convnet", "width": 2, "norm": "batch"},
    "training": {"rounds": 1, "local": {"batch_size": 4}},
    "defenses": {"none": [], "local": [{"name": "local_aggregation", "steps": 3}]},
    "attacks": [],
}

LABELS, BN = (Grant.values()[name] for name in ("labels", "bn"))


def batch_norm(mode: Mode = "train") -> tuple[Observation, GroundTruth]:
    return make_observation(
        *example_batch(4),
        model="convnet",
        model_parameters={"width": 3, "norm": "batch"},
        training=LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1, mode=mode),
    )


def leaves(value: object) -> Iterator[object]:
    """Everything that is held inside `value`, and `value`."""
    yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from (*leaves(key), *leaves(member))
    elif isinstance(value, tuple | list):
        for member in value:
            yield from leaves(member)


def holds(value: object, secret: Tensor) -> bool:
    """Whether the numbers of `secret` are in `value`: as a tensor, in part of one, or as a list."""
    needle = secret.flatten().double()
    for leaf in leaves(value):
        if isinstance(leaf, tuple | list):
            if not all(isinstance(member, int | float) for member in leaf):
                continue
            leaf = torch.tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.numel() >= needle.numel():
            windows = leaf.flatten().double().unfold(0, needle.numel(), 1)
            if bool((windows == needle).all(1).any()):
                return True
    return False


@pytest.mark.parametrize("stack", ["none", "local"])
def test_neither_observation_nor_recording_holds_labels_or_images(
    stack: str, tmp_path: Path
) -> None:
    workload = Workload(resolve(SCENARIO), stack)
    parameters, buffers = workload.initial()
    result = workload.client_update(1, 1, parameters, buffers, {})
    observation = workload.observation(1, 1, result.update, parameters, buffers)
    path = save_observation(observation, tmp_path)
    save_truth(result.truth, tmp_path, observation.id, 1)
    recorded = load_observation(path)
    row = result.truth.images[0, 0, 5]
    for seen in (observation, recorded, json.loads(path.read_text())):
        assert not holds(seen, result.truth.labels)
        for pixels in (row, normalize(result.truth.images, workload.spec)[0, 0, 5]):
            assert not holds(seen, pixels)
    written = {file.parts[len(tmp_path.parts)] for file in tmp_path.rglob("*.safetensors")}
    assert written == {"observations", "truth"}
    assert holds(replace(observation, buffers={"y": result.truth.labels}), result.truth.labels)
    assert holds({"user": [{"labels": result.truth.labels.tolist()}]}, result.truth.labels)


@pytest.mark.parametrize("bn", BN)
@pytest.mark.parametrize("labels", LABELS)
def test_labels_and_statistics_are_handed_over_only_as_granted(labels: str, bn: str) -> None:
    observation, truth = batch_norm()
    shown, knowledge = hand_over(observation, truth, Grant(labels=labels, bn=bn))
    assert knowledge.grant == Grant(labels=labels, bn=bn)
    assert holds((shown, knowledge), truth.labels) == (labels == "known")
    assert (knowledge.true_labels is not None) == (labels == "known")
    assert (knowledge.exact_bn is not None) == (bn == "exact")
    assert bool(shown.buffers_update) == (bn in ("inferred", "exact"))
    (asked,) = questions(PropertyInference(of="clients"), observation, truth, knowledge.grant, 0)
    (alone,) = asked.knowledge.seen
    assert bool(alone.buffers_update) == (bn in ("inferred", "exact"))
    assert shown.buffers, "the global model's own statistics are public"
    kept = replace(shown, buffers_update=observation.buffers_update)
    assert kept == observation, "nothing else is changed"


@pytest.mark.parametrize("features", ["none", "known"])
def test_features_are_handed_over_only_as_granted(features: str) -> None:
    head = {"width": 40, "planted": 30}
    observation, truth = make_observation(
        *example_batch(3), model="mlp", model_parameters={"hidden": [7], "head": head}
    )
    assert truth.features is not None
    _, knowledge = hand_over(observation, truth, Grant.least(features=features))
    assert knowledge.grant.features == features
    assert holds(knowledge, truth.features) == (features == "known")


def test_public_images_are_handed_over_only_as_granted() -> None:
    observation, truth = batch_norm()
    public = (example_batch(9)[0][4:] * 255).byte()
    _, without = hand_over(observation, truth, Grant(labels="known", bn="exact"))
    granted = Grant.least(public="test")
    shown, knowledge = hand_over(observation, truth, granted, Public(images=public))
    assert not holds(without, public)
    assert not holds(shown, public)
    assert holds(knowledge, public)
    assert not holds(knowledge, truth.images)
    assert (without.grant.public, knowledge.grant.public) == ("none", "test")
    assert not holds(hand_over(observation, truth, Grant(), Public(images=public)), public)
    with pytest.raises(ValueError, match="public"):
        hand_over(observation, truth, granted)


def test_without_the_truth_it_cannot_be_granted() -> None:
    observation, _ = batch_norm()
    with pytest.raises(ValueError, match="truth"):
        hand_over(observation, None, Grant(labels="known"))
    with pytest.raises(ValueError, match="truth"):
        hand_over(observation, None, Grant.least(bn="exact"))
    with pytest.raises(ValueError, match="truth"):
        hand_over(observation, None, Grant(features="known"))
    _, knowledge = hand_over(observation, None, Grant(labels="inferred", bn="inferred"))
    assert knowledge == Knowledge(grant=Grant(labels="inferred", bn="inferred"))


def test_exact_statistics_are_those_of_the_victims_batch() -> None:
    observation, truth = batch_norm()
    _, knowledge = hand_over(observation, truth, Grant.least(bn="exact"))
    assert knowledge.exact_bn is not None
    model = rebuild(observation)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert set(knowledge.exact_bn) == {f"{n}.{kind}" for n in names for kind in ("mean", "var")}
    first = model.body[0](normalize(truth.images, observation.model))  # type: ignore[index]
    torch.testing.assert_close(knowledge.exact_bn["body.1.mean"], first.mean((0, 2, 3)))
    count = first.numel() / first.shape[1]
    for name in names:  # what a client releases gives them away: PyTorch's momentum is 0.1
        released = observation.buffers_update
        mean = released[f"{name}.running_mean"] / 0.1
        torch.testing.assert_close(knowledge.exact_bn[f"{name}.mean"], mean, rtol=1e-4, atol=1e-5)
        if name == "body.1":
            var = (released[f"{name}.running_var"] - 0.9) / 0.1 * (count - 1) / count
            torch.testing.assert_close(knowledge.exact_bn[f"{name}.var"], var, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", Grant.values())
def test_an_attack_that_needs_more_than_granted_is_refused(name: str) -> None:
    values = Grant.values()[name]
    for needed, granted in itertools.product(values, values):
        missing = (
            Grant.most().model_copy(update={name: granted}).lacks(Grant.least(**{name: needed}))
        )
        assert (missing is None) == (values.index(granted) >= values.index(needed))
        if missing:
            assert f"knowledge.{name}: {needed}" in missing
            assert f"--grant {name}={needed}" in missing
            assert granted in missing


def test_the_mode_is_declared_recorded_and_counts(tmp_path: Path) -> None:
    seen = {mode: batch_norm(mode) for mode in get_args(Mode)}
    updates = {}
    for mode, (observation, truth) in seen.items():
        assert observation.training.mode == mode
        assert (
            load_observation(save_observation(observation, tmp_path / mode)).training.mode == mode
        )
        assert bool(observation.buffers_update) == (mode == "train")
        updates[mode] = torch.cat([tensor.flatten() for tensor in observation.update.values()])
        other = replace(observation.training, mode="eval" if mode == "train" else "train")
        assert at_truth(observation, truth) < 1e-6
        assert at_truth(replace(observation, training=other), truth) > 1e-2
    gap = (updates["train"] - updates["eval"]).norm() / updates["eval"].norm()
    assert float(gap) > 0.1


def test_the_mode_of_a_scenario_reaches_the_client() -> None:
    updates = []
    for mode in get_args(Mode):
        local = {"batch_size": 4, "mode": mode}
        workload = Workload(
            resolve({**SCENARIO, "training": {"rounds": 1, "local": local}}), "none"
        )
        parameters, buffers = workload.initial()
        result = workload.client_update(1, 1, parameters, buffers, {})
        observation = workload.observation(1, 1, result.update, parameters, buffers)
        assert observation.training.mode == mode
        model = rebuild(observation).train(mode == "train")
        scratch = {name: value.clone() for name, value in buffers.items()}
        weights = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        images = normalize(result.truth.images, workload.spec)
        logits = functional_call(model, (weights, scratch), (images,))
        loss = nn.functional.cross_entropy(logits, result.truth.labels)
        (expected,) = torch.autograd.grad(loss, [weights["body.0.weight"]])
        torch.testing.assert_close(observation.update["body.0.weight"], expected)
        updates.append(expected)
    assert not torch.allclose(updates[0], updates[1], rtol=0.05)


def at_truth(observation: Observation, truth: GroundTruth) -> float:
    """The matching objective at the true images and labels."""
    matching = Matching(observation)
    images = normalize(truth.images, observation.model)
    candidate = Candidate(images, truth.labels)
    return float(matching.differentiate(candidate, squared_distance)[0])
