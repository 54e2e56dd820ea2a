"""Labels off the last layer: exact where they are known to be, and never a crash."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining, Observation
from fedsim_attacks.labels import label_inference
from fedsim_attacks.labels.label_inference import infer_labels

MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model": "lenet"},
    "mlp": {"model": "mlp"},
    "softmax regression": {"model": "mlp", "model_parameters": {"hidden": []}},
    "convnet": {"model": "convnet", "model_parameters": {"width": 8}},
    "batch norm": {"model": "convnet", "model_parameters": {"width": 8, "norm": "batch"}},
    "two-layer head": {"model": "mlp", "model_parameters": {"head": {"width": 256}}},
    "planted head": {
        "model": "convnet",
        "model_parameters": {"width": 4, "head": {"width": 64, "planted": 32}},
    },
}
BATCH = [3, 3, 3, 7, 7, 1, 0, 0]

over_models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def observe(labels: list[int], **fields: Any) -> Observation:
    images, _ = example_batch(len(labels))
    return make_observation(images, torch.tensor(labels), **fields)[0]


def counts(labels: Tensor | list[int]) -> list[int]:
    found: list[int] = torch.bincount(torch.as_tensor(labels), minlength=10).tolist()
    return found


def right(found: Tensor, labels: list[int]) -> int:
    """How many labels are found, in any order."""
    return sum(map(min, counts(found), counts(labels)))


@over_models
@pytest.mark.parametrize("label", [0, 6])
def test_the_label_of_one_image_is_exact(model: dict[str, Any], label: int) -> None:
    assert infer_labels(observe([label], **model)).tolist() == [label]


@pytest.mark.parametrize("labels", [BATCH, [4] * 5], ids=str)
@over_models
def test_repeated_labels_are_exact_on_fresh_models(
    model: dict[str, Any], labels: list[int]
) -> None:
    for seed in range(2):
        found = infer_labels(observe(labels, seed=seed, **model))
        assert found.dtype == torch.int64
        assert sorted(found.tolist()) == sorted(labels)


DEALT = {
    "steps": {"training": LocalTraining(algorithm="fedavg", steps=2, batch_size=4, lr=0.003)},
    "clients": {"defense": [{"name": "aggregate"}], "num_clients": 2},
}


@pytest.mark.parametrize("case", DEALT.values(), ids=DEALT.keys())
def test_labels_are_dealt_out_over_steps_and_clients(case: dict[str, Any]) -> None:
    found = infer_labels(observe([3, 3, 7, 0, 3, 3, 7, 0], **case))
    assert counts(found[:4]) == counts(found[4:]) == counts([3, 3, 7, 0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["lenet", "mlp", "two-layer head"])
def test_local_steps_on_one_batch(name: str, momentum: float) -> None:
    training = LocalTraining(
        algorithm="fedavg", steps=3, batch_size=8, lr=0.003, momentum=momentum, batches="same"
    )
    found = infer_labels(observe(BATCH, training=training, **MODELS[name]))
    assert counts(found) == counts(BATCH)


@pytest.mark.parametrize("norm", [1e3, 0.5, 1e-2])
@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet"])
def test_clipping_by_any_factor_leaves_the_labels(name: str, norm: float) -> None:
    found = infer_labels(observe(BATCH, defense=[{"name": "clip", "norm": norm}], **MODELS[name]))
    assert counts(found) == counts(BATCH)


@over_models
@pytest.mark.parametrize(
    ("defense", "least"),
    [
        ({"name": "gradient_pruning", "ratio": 0.9}, 3),
        ({"name": "gradient_pruning", "ratio": 0.999}, 0),
        ({"name": "gaussian_noise", "std": 0.01}, 5),
        ({"name": "gaussian_noise", "std": 100.0}, 0),
        ({"name": "quantization", "bits": 2}, 0),
    ],
    ids=str,
)
def test_defended_updates_cost_accuracy_and_never_a_crash(
    model: dict[str, Any], defense: dict[str, Any], least: int
) -> None:
    found = infer_labels(observe(BATCH, defense=[defense], **model))
    assert found.shape == (8,)
    assert bool(((found >= 0) & (found < 10)).all())
    assert right(found, BATCH) >= least


def test_strong_noise_hides_the_labels() -> None:
    """So that a label accuracy above chance is read off the update and nowhere else."""
    hits = 0
    for seed in range(10):
        noise = {"name": "gaussian_noise", "std": 100.0}
        found = infer_labels(observe([seed], defense=[noise], seed=seed))
        hits += found.tolist() == [seed]
    assert hits <= 4


def test_a_head_without_a_linear_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    observation = observe([3])
    headless = Classifier(torch.nn.Flatten(), torch.nn.Identity())
    monkeypatch.setattr(label_inference, "rebuild", lambda _: headless)
    with pytest.raises(AttackFailed, match="grant known labels"):
        infer_labels(observation)
