"""The span metric of recovered features: known answers and what it must not depend on."""

import math

import pytest
import torch

from fedsim.contracts.target import GuessRequest
from fedsim.scoring import Guesser, Unavailable, score
from fedsim.targets.features import Features, _principal_angles, subspace_error
from fedsim.targets.images import ImageAid
from fedsim.types import GroundTruth, Reconstruction


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_known_answers():
    truth = torch.tensor([[3.0, 0, 0], [1, 1, 0], [0, 0, 2]])
    claimed = torch.tensor([[5.0, 0, 0], [0, 0, 0], [-9, 0, 0]])
    expected = torch.tensor([0, 0.5**0.5, 1], dtype=torch.float64)
    torch.testing.assert_close(subspace_error(claimed, truth), expected)
    assert isinstance(subspace_error(normal(2, 5), torch.zeros(2, 5)), Unavailable)


def test_exact_to_rounding():
    """The direct formula 1 - cos² would bottom out at 1e-8."""
    truth = normal(6, 40)
    assert float(subspace_error(normal(6, 6, seed=1) @ truth, truth).max()) < 1e-13


def test_order_sign_scale_and_mixing_do_not_matter():
    truth, claimed = normal(4, 20), normal(4, 20, seed=1)
    expected = subspace_error(claimed, truth)
    for other in (claimed.flip(0), -claimed, 1e-9 * claimed, normal(4, 4, seed=2) @ claimed):
        torch.testing.assert_close(subspace_error(other, truth), expected)
    torch.testing.assert_close(subspace_error(claimed, -7 * truth), expected)


def test_guessing_nothing_and_guessing_more_than_there_is():
    truth = normal(3, 20)
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(subspace_error(torch.zeros(3, 20), truth), ones)
    many = torch.cat([torch.zeros(3, 20), normal(20, 20, seed=1)])
    torch.testing.assert_close(subspace_error(many, truth), ones)  # as many as there are count


def test_features_are_matched_by_direction():
    """An attack that knows no norms: nearest in distance would be the wrong one."""
    true, found = torch.tensor([[[10.0, 0.0], [0.6, 0.8]], [[3.0, 4.0], [1.0, 0.0]]]).double()
    truth = GroundTruth(images=torch.zeros(2, 1, 8, 8), labels=torch.tensor([0, 1]), features=true)
    scores = score(Reconstruction(features=found, loss=0.0, iterations=0), truth)
    assert scores.assignment == [1, 0]
    assert scores.per_image["feature_cosine"] == pytest.approx([1.0, 1.0])


def test_principal_angles_of_known_planes():
    """Two planes that share a line and are 30 degrees apart around it."""
    truth = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]])
    turned = math.radians(30)
    claimed = torch.tensor([[0, math.cos(turned), math.sin(turned), 0], [2.0, 0, 0, 0]])
    found = _principal_angles(claimed, truth)
    torch.testing.assert_close(found, torch.tensor([0.0, 30.0]).double())


def test_principal_angles_do_not_depend_on_the_basis_and_small_ones_are_seen():
    truth, claimed = normal(4, 20), normal(4, 20, seed=1)
    for other in (claimed.flip(0), -3 * claimed, normal(4, 4, seed=2) @ claimed):
        expected = _principal_angles(claimed, truth)
        torch.testing.assert_close(_principal_angles(other, truth), expected)
    truth, claimed = torch.eye(1, 3).double(), torch.tensor([[1.0, 1e-9, 0]]).double()
    found = _principal_angles(claimed, truth)
    torch.testing.assert_close(found, torch.rad2deg(torch.tensor([1e-9]).double()))


def test_directions_that_were_not_found_are_at_right_angles():
    truth = torch.eye(3, 5)
    assert _principal_angles(torch.zeros(3, 5), truth).tolist() == [90.0] * 3
    assert _principal_angles(torch.eye(1, 5), truth).tolist() == [0.0, 90.0, 90.0]
    assert isinstance(_principal_angles(truth, truth[[0, 0, 1]]), Unavailable)


def test_the_guess_of_a_span_leaves_the_least_of_public_features():
    """Of all spans of two directions, in mean square; and the guess of each is the mean."""
    stream = torch.Generator().manual_seed(0)
    bulk = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2])
    public = torch.randn(500, 5, generator=stream) * bulk + torch.tensor([0, 0, 4.0, 0, 0])
    truth = torch.randn(2, 5, generator=stream) * bulk + torch.tensor([0, 0, 4.0, 0, 0])
    metrics = Features().guessed_from(public, truth)
    units = public.double() / public.double().norm(dim=1, keepdim=True)
    values, axes = torch.linalg.eigh(units.T @ units)
    best = axes[:, values.argsort(descending=True)[:2]]
    unit = truth.double() / truth.double().norm(dim=1, keepdim=True)
    outside = (unit - unit @ best @ best.T).norm(dim=1).mean()
    assert metrics["subspace_error"] == pytest.approx(float(outside))
    error = (public.double().mean(0) - truth).norm(dim=1) / truth.norm(dim=1)
    assert metrics["feature_error"] == pytest.approx(float(error.mean()))
    assert "feature_error" not in Features().guessed_from(public, torch.zeros(1, 5))


def test_without_true_features_no_model_is_rebuilt_for_a_guess():
    """As of a failed attack on a stranger's recording, whose model may not be installed."""
    public = Guesser(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4))
    truth = GroundTruth(images=torch.zeros(1, 1, 2, 2), labels=torch.tensor([0]))
    request = GuessRequest(truth=truth, observation=object())
    assert Features().guess(request, {"images": ImageAid(guesser=public)}) is None
