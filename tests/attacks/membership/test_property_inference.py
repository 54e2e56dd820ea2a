"""Shares of classes read from updates by shadows, on data whose shares are known."""

import pytest
import torch

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.contracts.metric import ScoringError
from fedsim.targets.class_shares import ClassShares, class_share_error
from fedsim.testing.cases import make_observation
from fedsim.types import GroundTruth, LocalTraining
from fedsim_attacks.membership.property_inference import PropertyInference, _regress

CLASSES, BATCH = 4, 40
SGD = LocalTraining(algorithm="fedavg", steps=2, batch_size=BATCH // 2, lr=0.1)


def draw(labels, seed):
    """Images of 3x3 pixels whose brightest one tells the class."""
    noise = torch.rand(len(labels), 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    images = 0.4 * noise
    images.view(len(labels), 9)[torch.arange(len(labels)), labels] += 0.6
    return images


@pytest.fixture
def known():
    labels = torch.arange(200) % CLASSES
    images = (draw(labels, 1) * 255).round().to(torch.uint8)
    return Knowledge(grant=Grant.least(public="test"), public_images=images, public_labels=labels)


def observe(labels, **changes):
    settings = {"model": "mlp", "model_parameters": {"hidden": [8]}, "training": SGD}
    return make_observation(draw(labels, 2), labels, num_classes=CLASSES, **{**settings, **changes})


@pytest.mark.parametrize("shares", [(34, 2, 2, 2), (0, 20, 20, 0)])
def test_shares_of_a_client_are_read_from_its_update(shares, known):
    labels = torch.arange(CLASSES).repeat_interleave(torch.tensor(shares))
    labels = labels[torch.randperm(BATCH, generator=torch.Generator().manual_seed(0))]
    observation, truth = observe(labels)
    answer = solve(PropertyInference(), observation, known, seed=0).reconstruction
    target = ClassShares()
    found = target.answer_of(answer)
    target.check(found, truth)
    assert class_share_error(found, target.truth_of(truth)) < 0.15
    assert class_share_error(torch.full((CLASSES,), 0.25), target.truth_of(truth)) > 0.4


def test_a_sum_tells_the_shares_of_all_its_clients_together(known):
    labels = torch.cat([torch.zeros(BATCH), torch.ones(BATCH)]).long()
    observation, truth = observe(labels, defense=[{"name": "aggregate"}], num_clients=2)
    answer = solve(PropertyInference(), observation, known, seed=0).reconstruction
    found = ClassShares().answer_of(answer)
    assert class_share_error(found, ClassShares().truth_of(truth)) < 0.15


def test_public_examples_without_classes_are_refused(known):
    observation, _ = observe(torch.arange(BATCH) % CLASSES)
    with pytest.raises(AttackFailed, match="public: test"):
        solve(PropertyInference(), observation, Knowledge(), seed=0)


def test_left_out_error_is_that_of_fits_without_each_shadow():
    stream = torch.Generator().manual_seed(0)
    updates = torch.randn(12, 30, generator=stream, dtype=torch.float64)
    updates = updates - updates.mean(0)
    shares = torch.rand(12, 3, generator=stream, dtype=torch.float64)
    shares = shares - shares.mean(0)
    gram, expected = updates @ updates.T, []
    for ridge in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0):
        added = ridge * gram.diagonal().mean()
        errors = []
        for left in range(12):
            kept = torch.arange(12) != left
            own = gram[kept][:, kept] + added * torch.eye(11, dtype=torch.float64)
            guess = gram[left, kept] @ torch.linalg.solve(own, shares[kept])
            errors.append((shares[left] - guess).abs().mean())
        expected.append(float(torch.stack(errors).mean()))
    lost, _ = _regress(updates, shares, updates[0])
    assert lost == pytest.approx(min(expected), rel=1e-9)


def test_error_is_the_share_of_examples_that_would_have_to_change():
    assert class_share_error(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25, 0.25])) == 0.25
    assert class_share_error(torch.tensor([1.0]), torch.tensor([0.0, 1.0])) == 1.0


@pytest.mark.parametrize("answer", [[0.5, 0.6], [1.5, -0.5], [[1.0]]], ids=str)
def test_answers_that_are_no_distribution_are_refused(answer):
    truth = GroundTruth(images=torch.zeros(2, 1, 1, 1), labels=torch.tensor([0, 1]))
    with pytest.raises(ScoringError, match="sum to 1"):
        ClassShares().check(torch.tensor(answer), truth)
