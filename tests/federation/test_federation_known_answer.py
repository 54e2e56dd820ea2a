"""The federation against the same training written out by hand in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from federation_support import BATCH_NORM, final_model, observation, scenario, train, workload
from torch import Tensor, nn

from fedsim import rng
from fedsim.models.base import build, normalize
from fedsim.recording.truth import load_truth
from fedsim.scenario import Scenario

ALL = {"observe__clients": "all", "observe__rounds": [1, 2, 3]}


def batches(out: Path, wanted: Scenario, round: int, client: int) -> list[tuple[Tensor, Tensor]]:
    """What the client says that it trained on: one (images, labels) per local step."""
    truth = load_truth(out, f"none/round-{round:04d}/client-{client:04d}-training")
    size = wanted.training.local.batch_size
    return list(
        zip(
            torch.split(normalize(truth.images, workload(wanted).spec), size),
            torch.split(truth.labels, size),
            strict=True,
        )
    )


def model(wanted: Scenario) -> nn.Module:
    return build(workload(wanted).spec, rng.derive(wanted.seed, "model")).train()


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def test_fedsgd_is_gradient_descent_on_the_mean_of_the_clients_losses(tmp_path: Path) -> None:
    wanted = scenario(**ALL)
    records = train(wanted, tmp_path)
    by_hand = model(wanted)
    for record in records:
        losses = []
        for client in range(4):
            ((images, labels),) = batches(tmp_path, wanted, record.round, client)
            losses.append(F.cross_entropy(by_hand(images), labels))
        mean = torch.stack(losses).mean()
        grads = torch.autograd.grad(mean, list(by_hand.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(by_hand.parameters(), grads, strict=True):
                parameter.sub_(wanted.training.local.lr * grad)
        assert record.train_loss == pytest.approx(mean.item(), rel=1e-5)
        assert record.participants == (0, 1, 2, 3) and record.aggregated == 4
    expected = {name: value.detach() for name, value in by_hand.named_parameters()}
    assert deviation(final_model(tmp_path, wanted), expected) < 1e-6


def test_fedavg_with_batch_norm_is_the_mean_of_locally_trained_models(tmp_path: Path) -> None:
    wanted = scenario(
        **ALL,
        **BATCH_NORM,
        training__local={"steps": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9},
    )
    train(wanted, tmp_path)
    parameters = {n: p.detach() for n, p in model(wanted).named_parameters()}
    buffers = {n: b.clone() for n, b in model(wanted).named_buffers() if b.is_floating_point()}
    assert buffers
    for round in (1, 2, 3):
        trained = []
        for client in range(4):
            local = model(wanted)
            local.load_state_dict({**parameters, **buffers}, strict=False)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.05, momentum=0.9)
            for images, labels in batches(tmp_path, wanted, round, client):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(local(images), labels))
                optimizer.step()
            trained.append(local.state_dict())
        parameters = {n: torch.stack([t[n] for t in trained]).mean(0) for n in parameters}
        buffers = {n: torch.stack([t[n] for t in trained]).mean(0) for n in buffers}
    assert deviation(final_model(tmp_path, wanted), {**parameters, **buffers}) < 1e-5


def test_a_tiny_update_survives_the_wire(tmp_path: Path) -> None:
    """As new weights in float32 it would have been rounded away: it is 1e-9 of them."""
    clip = [{"name": "clip", "parameters": {"norm": 1e-9}}]
    wanted = scenario(defenses={"clipped": clip}, training__rounds=1)
    train(wanted, tmp_path, "clipped")
    seen = observation(tmp_path, "clipped/round-0001/client-0000-training")
    flat = torch.cat([value.flatten() for value in seen.update.values()])
    before = torch.cat([value.flatten() for value in seen.parameters.values()])
    assert float(flat.double().norm()) == pytest.approx(1e-9, rel=1e-5)
    as_weights = (before - flat) - before
    assert float((as_weights + flat).norm()) > 0.5e-9


def test_participants_follow_the_seed_and_nothing_else(tmp_path: Path) -> None:
    wanted = scenario(federation={"participation": 0.5}, training__rounds=6)
    schedule = workload(wanted).schedule
    records = train(wanted, tmp_path)
    assert [r.participants for r in records] == [
        schedule.round(r).participants for r in range(1, 7)
    ]
    assert len({r.participants for r in records}) > 1
    assert all(r.aggregated == 2 for r in records)
