"""Labels off the last layer: exact where they are known to be, and never a crash."""

from dataclasses import replace

import pytest
import torch

from fedsim.contracts.attack import AttackFailed
from fedsim.models.base import Classifier
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import LocalTraining
from fedsim_attacks.labels import label_inference
from fedsim_attacks.labels.label_inference import infer_labels

MODELS = {
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


def observe(labels, **fields):
    images, _ = example_batch(len(labels))
    return make_observation(images, torch.tensor(labels), **fields)[0]


def counts(labels):
    return torch.bincount(torch.as_tensor(labels), minlength=10).tolist()


def right(found, labels):
    """How many labels are found, in any order."""
    return sum(map(min, counts(found), counts(labels)))


@pytest.mark.parametrize("labels", [[0], [6], BATCH, [4] * 5], ids=str)
@over_models
def test_labels_are_exact_on_fresh_models(model, labels):
    for seed in range(2):
        found = infer_labels(observe(labels, seed=seed, **model))
        assert found.dtype == torch.int64
        assert sorted(found.tolist()) == sorted(labels)


DEALT = {
    "steps": {"training": LocalTraining(algorithm="fedavg", steps=2, batch_size=4, lr=0.003)},
    "clients": {"defense": [{"name": "aggregate"}], "num_clients": 2},
}


@pytest.mark.parametrize("case", DEALT.values(), ids=DEALT.keys())
def test_labels_are_dealt_out_over_steps_and_clients(case):
    found = infer_labels(observe([3, 3, 7, 0, 3, 3, 7, 0], **case))
    assert counts(found[:4]) == counts(found[4:]) == counts([3, 3, 7, 0])


ONE_BATCH = LocalTraining(algorithm="fedavg", steps=3, batch_size=8, lr=0.003, batches="same")
HARMLESS = [
    *({"training": replace(ONE_BATCH, momentum=each)} for each in (0.0, 0.9)),
    *({"defense": [{"name": "clip", "norm": norm}]} for norm in (1e3, 0.5, 1e-2)),
]


@pytest.mark.parametrize("case", HARMLESS, ids=["steps", "momentum", *"123"])
@pytest.mark.parametrize("name", ["lenet", "mlp", "convnet", "two-layer head"])
def test_neither_steps_on_one_batch_nor_clipping_hide_labels(name, case):
    assert counts(infer_labels(observe(BATCH, **case, **MODELS[name]))) == counts(BATCH)


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
def test_defended_updates_cost_accuracy_and_never_a_crash(model, defense, least):
    found = infer_labels(observe(BATCH, defense=[defense], **model))
    assert found.shape == (8,)
    assert bool(((found >= 0) & (found < 10)).all())
    assert right(found, BATCH) >= least


def test_strong_noise_hides_the_labels():
    """So that a label accuracy above chance is read off the update and nowhere else."""
    noise = [{"name": "gaussian_noise", "std": 100.0}]
    found = [infer_labels(observe([seed], defense=noise, seed=seed)).item() for seed in range(10)]
    assert sum(label == seed for seed, label in enumerate(found)) <= 4


def test_a_head_without_a_linear_layer_is_refused(monkeypatch):
    headless = Classifier(torch.nn.Flatten(), torch.nn.Identity())
    monkeypatch.setattr(label_inference, "rebuild", lambda _: headless)
    with pytest.raises(AttackFailed, match="grant known labels"):
        infer_labels(observe([3]))


@pytest.mark.parametrize(("model", "held"), [("lenet", 1 << 25), ("mlp", 1 << 25), ("lenet", 5000)])
def test_labels_show_in_the_body_where_nothing_of_the_head_is_sent(model, held, monkeypatch):
    """A head of zeros has no least entry: it would say class 0 of every image."""
    monkeypatch.setattr(label_inference, "_HELD", held)
    stack = torch.stack

    def bounded(tensors):
        assert sum(map(torch.numel, tensors)) <= held
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", bounded)
    for label in range(3):
        batch = example_batch(1)[0], torch.tensor([label])
        defense = [{"name": "exclude_vars", "exclude_vars": "head"}]
        observation, _ = make_observation(*batch, model=model, defense=defense)
        assert infer_labels(observation).tolist() == [label]


def test_an_update_of_zeros_costs_accuracy_and_never_a_crash():
    observation = observe([3, 6], **MODELS["mlp"])
    silent = {name: torch.zeros_like(tensor) for name, tensor in observation.update.items()}
    assert infer_labels(replace(observation, update=silent)).shape == (2,)
