"""Features over several local steps: one gradient at the middle of the path, and what corrects it.

The victims are small; benchmarks/honest_features.py measures a ResNet-18.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deep_victims import photos
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Knowledge
from fedsim.models.base import normalize
from fedsim.models.local import features_of, gradient, loss_function
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, LocalTraining, Observation
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._local_steps import (
    Drift,
    LocalPath,
    as_one_gradient,
    middle,
)
from fedsim_attacks.classifier_features.classifier_fit import ClassifierFit


def training(**fields: Any) -> LocalTraining:
    same: dict[str, Any] = {"algorithm": "fedavg", "steps": 5, "batch_size": 4, "lr": 0.001}
    return LocalTraining(**{**same, "batches": "same", **fields})


def observe(**case: Any) -> tuple[Observation, GroundTruth]:
    """Four photographs in five steps of a ConvNet."""
    chosen: dict[str, Any] = {"model": "convnet", "model_parameters": {"width": 8}}
    return make_observation(*photos(4), **{**chosen, "training": training(), **case})


def features_at(observation: Observation, share: float, truth: GroundTruth) -> Tensor:
    moved = as_one_gradient(observation, share)
    images = normalize(truth.images, observation.model)
    found = features_of(
        rebuild(moved), moved.parameters, moved.buffers, images, observation.training
    )
    return found.double()


def test_the_mean_gradient_is_that_of_the_middle() -> None:
    """What is left is of second order, and at the weights that were sent of first."""
    observation, truth = observe()
    images = normalize(truth.images, observation.model)
    (name,) = (n for n in observation.parameters if n.startswith("head") and "weight" in n)

    def left(share: float) -> float:
        one = as_one_gradient(observation, share)
        loss = loss_function(rebuild(one), dict(one.buffers), one.training)
        made = gradient(loss, dict(one.parameters), images, truth.labels)
        return float((made[name] - one.update[name]).norm())

    assert left(0.45) < 0.3 * left(0.0)
    assert left(0.45) < 0.3 * left(1.0)


def test_noise_tells_most_of_how_features_drift() -> None:
    observation, truth = observe()
    drift = Drift(observation, 0.4, rng.generator(0, "drift"))
    middle_ = features_at(observation, 0.4, truth)
    for share in (0.0, 1.0):
        there = features_at(observation, share, truth)
        off = (drift(middle_, share) - there).norm() / (middle_ - there).norm()
        assert float(off) < 0.6
    torch.testing.assert_close(drift(middle_, 0.4), middle_)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_corrections_explain_what_the_middle_leaves(momentum: float) -> None:
    observation, truth = observe(training=training(momentum=momentum))
    path = LocalPath(observation, rng.generator(0, "path"))
    share = middle(observation.training, path._shares)
    features = features_at(observation, share, truth)
    seen = path.classifier.gradient
    whole = F.pad(features, (0, 1), value=1.0)
    errors = (whole @ path.classifier.weights.T).softmax(1) - F.one_hot(truth.labels, 10)
    one = errors.T @ whole / len(whole)
    before = float((seen - one).norm())
    after = float((seen - path._correction(features, truth.labels) - one).norm())
    assert after < 0.8 * before


@pytest.mark.parametrize(
    ("case", "suits"),
    [
        ({}, True),
        ({"model": "mlp", "model_parameters": {"hidden": []}}, False),
        ({"training": None}, False),
        ({"training": training(steps=2, batch_size=2, batches="different")}, False),
        ({"defense": [{"name": "gaussian_noise", "std": 1e-6}]}, False),
        ({"defense": [{"name": "clip", "norm": 1e-3}]}, False),
        (
            {
                "defense": [{"name": "aggregate"}],
                "num_clients": 2,
                "training": training(batch_size=2),
            },
            False,
        ),
    ],
    ids=["steps", "no body", "one step", "other batches", "noise", "clip", "clients"],
)
def test_exact_steps_of_one_client_on_one_batch_have_a_path(
    case: dict[str, Any], suits: bool
) -> None:
    observation, _ = observe(**case)
    assert LocalPath.suits(observation, ClassifierGradient.read(observation)) == suits


def test_features_over_five_steps_come_out_and_none_is_called_certain() -> None:
    observation, truth = observe()
    found = solve(ClassifierFit(), observation, Knowledge(), seed=1).reconstruction
    assert found.features is not None and truth.features is not None and found.labels is not None
    cosines = F.cosine_similarity(truth.features[:, None], found.features[None], dim=2)
    best, whose = cosines.max(1)
    assert sorted(whose.tolist()) == [0, 1, 2, 3]
    assert float(best.min()) > 0.998
    assert found.labels[whose].tolist() == truth.labels.tolist()
    assert found.determined is not None and not bool(found.determined.any())
    # They are of the weights that were sent: of those at the path's end hardly any is as near.
    lengths = (found.features[whose] - truth.features).norm(dim=1) / truth.features.norm(dim=1)
    end = features_at(observation, 1.0, truth).float()
    ends = (found.features[whose] - end).norm(dim=1) / truth.features.norm(dim=1)
    assert float(lengths.mean()) < 0.5 * float(ends.mean())


def test_a_path_on_which_features_drift_too_far_is_not_followed() -> None:
    """Large steps of a fresh network: the middle says nothing of its features then."""
    near, far = (observe(training=training(lr=lr))[0] for lr in (0.001, 0.1))
    paths = [LocalPath(each, rng.generator(0, "noise")) for each in (near, far)]
    assert [path.is_told for path in paths] == [True, False]
