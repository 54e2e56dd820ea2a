"""The NTK learner in its federation: the ensemble, its defenses, and what the ledger says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.federation import federate, refusals
from fedsim.federation.records import RoundRecord
from fedsim.learners import ntk
from fedsim.learners.ntk_ensemble import MODEL
from fedsim.models.base import build, normalize
from fedsim.privacy.composition.curves import of_mechanisms
from fedsim.recording.files import write_tensors
from fedsim.results.rows import spent
from fedsim.scenario import Scenario, ScenarioError
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError
from fedsim_defenses.gaussian_sampling import GaussianSampling, sampled_covariance, square_root
from fedsim_defenses.truncated_laplace import TruncatedLaplace, truncated_laplace

BASE: dict[str, Any] = {
    "name": "ntk",
    "seed": 5,
    "data": {"source": {"name": "digits", "size": 8}, "clients": 3},
    "learner": {"name": "ntk", "ridge": 1.0},
    "training": {"rounds": 1},
    "attacks": [],
}
KERNEL = {"name": "gaussian_sampling", "beta": 1e-3, "lift": 1.0, "samples": 50}
INPUTS = {"name": "truncated_laplace", "beta": 1e-3, "epsilon": 0.5, "delta": 1e-4}


def scenario(**changes: Any) -> Scenario:
    return resolve({**BASE, **changes})


def data(workload: Workload) -> Dataset:
    assert isinstance(workload.dataset, Dataset)
    return workload.dataset


def pixels(images: Tensor) -> Tensor:
    rows = images.flatten(1).double() / 255
    return rows / rows.norm(dim=1, keepdim=True)


def by_hand(workload: Workload, client: int) -> tuple[Tensor, Tensor]:
    """(X, α) of a client, by the formulas: pixels, the discrete kernel, λ = 1."""
    part = workload.parts[client]
    rows = pixels(data(workload).train_images[part])
    stream = rng.generator(5, "learner", "neurons")
    weights = ntk.draw_weights(256, 64, 1.0, stream)
    gram = ntk.kernel(rows, rows, weights)
    labels = ntk.one_hot(data(workload).train_labels[part], 10)
    shifted = gram + torch.eye(len(gram), dtype=torch.float64)
    return rows, torch.linalg.solve(shifted, labels)


def test_the_ensemble_is_the_mean_of_the_clients_predictions(tmp_path: Path) -> None:
    """Through Flower's messages: by the test loss and accuracy of predictions made by hand."""
    wanted = scenario(defenses={"none": [], "sum": ["aggregate"]})
    here = Workload(wanted, "none")
    weights = ntk.draw_weights(256, 64, 1.0, rng.generator(5, "learner", "neurons"))
    test = pixels(data(here).test_images)
    fitted = [by_hand(here, client) for client in range(3)]
    each = [ntk.kernel(test, train, weights) @ alpha for train, alpha in fitted]
    mean = torch.stack(each).mean(0)
    labels = data(here).test_labels
    accuracy = float((mean.argmax(1) == labels).double().mean())
    loss = float((mean - ntk.one_hot(labels, 10)).square().sum(1).mean())
    assert accuracy > 0.9
    for stack in ("none", "sum"):
        records: list[RoundRecord] = []
        federate(wanted, stack, tmp_path, resume=False, on_round=records.append)
        assert records[0].test_accuracy == pytest.approx(accuracy, abs=1e-9)
        assert records[0].test_loss == pytest.approx(loss, rel=1e-6)
        assert records[0].aggregated == 3 and records[0].train_loss is None


def test_a_private_client_releases_what_follows_from_private_statistics() -> None:
    """K̃ then X̃, drawn from the defenses' stream in this order, and nothing else of the data."""
    wanted = scenario(defenses={"private": [KERNEL, INPUTS]})
    here = Workload(wanted, "private")
    result = here.client_update(1, 1, *here.initial(), {})
    rows, _ = by_hand(here, 1)
    weights = ntk.draw_weights(256, 64, 1.0, rng.generator(5, "learner", "neurons"))
    lifted = ntk.kernel(rows, rows, weights) + torch.eye(len(rows), dtype=torch.float64)
    stream = rng.generator(5, "defense", 1, 1)
    sampled = sampled_covariance(square_root(lifted), 50, stream)
    made = TruncatedLaplace.model_validate({k: v for k, v in INPUTS.items() if k != "name"})
    assert here.release is not None
    noise = made.guarantee(here.release)
    noisy = truncated_laplace(rows, noise.scale, noise.bound, stream)
    labels = ntk.one_hot(data(here).train_labels[here.parts[1]], 10)
    alpha = torch.linalg.solve(sampled + torch.eye(len(rows), dtype=torch.float64), labels)
    expected = ntk.quadratic_form(noisy, alpha, weights)
    form = result.update.tensors[MODEL]
    torch.testing.assert_close(form, expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max()))
    assert result.update.num_examples == 1 and result.truth is None and result.loss is None


def test_the_ledger_composes_both_statistics_and_misses_none() -> None:
    both = scenario(
        defenses={
            "both": [KERNEL, INPUTS],
            "turned": [INPUTS, KERNEL],
            "kernel": [KERNEL],
            "inputs": [INPUTS],
            "free": [{**KERNEL, "samples": 0}, INPUTS],
            "noise": [{"name": "clip", "norm": 1}, {"name": "gaussian_noise", "multiplier": 2}],
        },
        privacy={"delta": 1e-3},
    )
    claims = {name: spent(Workload(both, name), 1) for name in both.defenses}
    here = Workload(both, "both")
    assert here.release is not None
    kernel, inputs = (d.guarantee(here.release) for d in here.stack.statistic_defenses)
    alone = [of_mechanisms((part,), 1e-3) for part in (kernel, inputs)]
    halves = sum(of_mechanisms((part,), 5e-4) for part in (kernel, inputs))
    assert max(alone) < claims["both"].epsilon < halves
    assert claims["turned"].epsilon == pytest.approx(claims["both"].epsilon, rel=1e-6)
    assert claims["free"].epsilon == pytest.approx(alone[1], rel=0.01)
    assert claims["both"].unit == "example" and claims["both"].relation == "close"
    assert "β = 0.001" in str(claims["both"].accountant)
    for name, missing in (("kernel", "features"), ("inputs", "kernel")):
        assert claims[name].epsilon == math.inf and missing in str(claims[name].reason)
    assert claims["noise"].unit == "client" and claims["noise"].epsilon < math.inf


def test_draws_are_the_most_that_are_private() -> None:
    here = Workload(scenario(), "none")
    assert here.release is not None
    made = GaussianSampling(beta=0.02, lift=1.0, epsilon=1.0, delta=1e-3).guarantee(here.release)
    more = GaussianSampling(beta=0.02, lift=1.0, samples=made.samples + 1).guarantee(here.release)
    at = np.array([1.0])
    assert made.samples > 1
    assert made.log_delta(at)[0] <= math.log(1e-3) < more.log_delta(at)[0]
    wide = GaussianSampling(beta=1.0, lift=0.01, epsilon=1.0, delta=1e-3)
    with pytest.raises(FedsimError, match="not even one draw"):
        wide.guarantee(here.release)
    free = GaussianSampling(beta=1e-9, lift=1.0, epsilon=1.0, delta=1e-3)
    assert free.guarantee(here.release).samples == 100_000


def test_features_are_a_frozen_models(tmp_path: Path) -> None:
    """As the weights' file has them, in eval mode, brought to unit length."""
    model = {"name": "mlp"}
    bare = scenario(learner={"name": "ntk", "kernel": "continuous"}, model=model)
    start = Workload(bare, "none")
    spec_model = start.computation._features._model  # type: ignore[attr-defined]
    other = {k: v + 0.1 for k, v in spec_model.state_dict().items() if v.is_floating_point()}
    write_tensors(tmp_path / "weights.safetensors", other)
    wanted = scenario(
        learner={"name": "ntk", "kernel": "continuous"},
        model=model,
        training={"rounds": 1, "weights": str(tmp_path / "weights.safetensors")},
    )
    here = Workload(wanted, "none")
    features = here.computation._features  # type: ignore[attr-defined]
    images = data(here).train_images[:5].float() / 255
    fresh = build(features._spec, 0)
    fresh.load_state_dict(other, strict=False)
    fresh.eval()
    with torch.no_grad():
        rows = fresh.features(normalize(images, features._spec)).double()
    torch.testing.assert_close(features.of(images), rows / rows.norm(dim=1, keepdim=True))
    assert here.release is not None
    assert here.release.features == rows.shape[1] and here.release.gain == 1.0
    assert not torch.equal(features.of(images), start.computation._features.of(images))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learner": {"name": "ntk", "kernel": "continuous", "neurons": 9}},
            "none with continuous",
        ),
        ({"attacks": ["idlg"]}, r"attacks\[0\]: "),
        (
            {"attacks": ["membership_inference"], "knowledge": {"rows": "others"}},
            "observe.batch_sizes: missing: what learner ntk releases is attacked in probes",
        ),
        (
            {"attacks": ["row_reconstruction"], "observe": {"batch_sizes": [4]}},
            r"attacks\[0\]: row_reconstruction needs knowledge.rows: others",
        ),
        ({"defenses": {"a": [{**KERNEL, "samples": None}]}}, "samples, or else both"),
        ({"defenses": {"a": [{**KERNEL, "least_eigenvalue": 1.0}]}}, "exactly one of lift"),
        (
            {"defenses": {"a": [{"name": "clip", "norm": 1.0}, INPUTS]}},
            "before all defenses of upd",
        ),
        (
            {"learner": "sgd", "model": "mlp", "defenses": {"a": [INPUTS]}, "training": {}},
            "choose learner ntk",
        ),
    ],
)
def test_what_a_scenario_cannot_mean(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve({**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "breast_cancer"}}, "learner ntk computes from images"),
        (
            {"data": {"source": {"name": "digits", "size": 128}}},
            "predictor of 10 classes and 16,384",
        ),
        (
            {"learner": {"name": "ntk", "release": "model"}},
            "learner: release: model is that of one client, and data.clients is 3",
        ),
        (
            {"defenses": {"a": [{**KERNEL, "samples": 5}, {**INPUTS, "beta": 0.1}]}},
            "defenses.a: .* the same beta",
        ),
        (
            {"defenses": {"a": [{"name": "random_projection", "epsilon": 1, "delta": 0.1}]}},
            "defenses.a: random_projection protects a sketch",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    wanted = scenario(**changes)
    with pytest.raises(FedsimError, match=message):
        refusals.check(Workload(wanted, next(iter(wanted.defenses))))
