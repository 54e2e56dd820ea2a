"""Each metric against a value worked out by hand, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from fedsim.contracts.metric import align
from fedsim.scoring import METRICS, ScoringError, score
from fedsim.scoring.guess import mean_image
from fedsim.targets.images import ImageAid
from fedsim.types import GroundTruth, Reconstruction


@pytest.fixture
def truth():
    pixels = torch.rand(4, 3, 12, 10, generator=torch.Generator().manual_seed(0)) * 0.8
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return GroundTruth(images=pixels, labels=torch.tensor([3, 1, 1, 0]), features=features)


def reconstruct(images=None, labels=None, features=None, loss=0.5):
    labels = None if labels is None else torch.tensor(labels)
    return Reconstruction(images=images, labels=labels, features=features, loss=loss, iterations=1)


def test_perfect_reconstruction_in_another_order(truth):
    order = torch.tensor([2, 0, 3, 1])
    scores = score(
        reconstruct(truth.images[order], truth.labels[order].tolist(), truth.features[order]), truth
    )
    assert scores.assignment == [1, 3, 0, 2]
    assert (scores["rmse"], scores["psnr"]) == (0.0, 60.0)
    assert scores["ssim"] == pytest.approx(1.0)
    assert (scores["label_accuracy"], scores["attack_loss"]) == (1.0, 0.5)
    assert scores["feature_error"] == pytest.approx(0.0)
    assert scores["feature_cosine"] == pytest.approx(1.0)
    guess = torch.zeros_like(truth.images[0])
    assert torch.equal(align(truth.images[order], scores.assignment, guess), truth.images)


def test_assignment_is_the_least_total_cost_not_the_greedy_one():
    # Truth 0 is nearest to reconstruction 0, and so is truth 1; greedy would cost 0.01 + 0.36.
    truth = GroundTruth(
        images=torch.tensor([0.5, 0.6]).view(2, 1, 1, 1).expand(2, 1, 8, 8),
        labels=torch.tensor([0, 1]),
    )
    images = torch.tensor([0.55, 0.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    scores = score(reconstruct(images), truth)
    assert scores.assignment == [1, 0]
    assert scores.per_image["rmse"] == pytest.approx([0.5, 0.05], abs=1e-6)


def test_ssim_of_a_shifted_constant_is_the_luminance_term():
    truth = GroundTruth(images=torch.full((1, 1, 9, 9), 0.4), labels=torch.tensor([0]))
    scores = score(reconstruct(torch.full((1, 1, 9, 9), 0.6)), truth)
    c1 = 0.01**2
    assert scores["ssim"] == pytest.approx((2 * 0.4 * 0.6 + c1) / (0.4**2 + 0.6**2 + c1), abs=1e-5)


@pytest.mark.parametrize("side", [2, 3, 4, 6])
def test_ssim_window_fits_small_images(side):
    images = torch.rand(2, 1, side, side, generator=torch.Generator().manual_seed(0))
    scores = score(reconstruct(images), GroundTruth(images=images, labels=torch.tensor([0, 1])))
    assert scores["psnr"] == 60.0
    if side > 2:
        assert scores["ssim"] == pytest.approx(1.0)
    else:
        assert scores["ssim"] is None and "3 x 3" in scores.notes["ssim"]


def test_feature_metrics(truth):
    scaled = score(reconstruct(features=truth.features * 1.5), truth)
    assert scaled["feature_error"] == pytest.approx(0.5)
    assert scaled["feature_cosine"] == pytest.approx(1.0)
    zero = score(reconstruct(features=truth.features * 0), truth)
    assert zero["feature_error"] == pytest.approx(1.0)
    assert zero["feature_cosine"] == 0.0
    one = replace(truth, images=truth.images[:1], labels=truth.labels[:1])
    one = replace(one, features=truth.features[:1])
    opposite = score(reconstruct(features=-truth.features[:1]), one)
    assert opposite["feature_cosine"] == pytest.approx(-1.0)


def test_feature_metrics_say_why_they_are_missing(truth):
    for features, why in ((None, "not recorded"), (torch.zeros(4, 6), "zero")):
        known = replace(truth, features=features)
        scores = score(reconstruct(features=torch.ones(4, 6)), known)
        assert scores["feature_error"] is None and why in scores.notes["feature_error"]


def test_labels_alone_are_compared_as_multisets(truth):
    for labels, share in (
        ([0, 1, 3, 1], 1.0),
        ([1, 1, 1, 1], 0.5),
        ([3, 3, 3, 3], 0.25),
        ([9, 9, 9, 9], 0.0),
        ([9, 9, 9, 9, 3, 1, 1, 0], 0.0),
    ):
        assert score(reconstruct(labels=labels), truth)["label_accuracy"] == share


def test_labels_count_whatever_image_they_came_with(truth):
    assert score(reconstruct(truth.images, [0, 1, 1, 3]), truth)["label_accuracy"] == 1.0
    assert score(reconstruct(truth.images.flip(0), [0, 1, 3, 3]), truth)["label_accuracy"] == 0.75


def test_missing_reconstructions_count_as_the_guess(truth):
    guess = mean_image(truth.images[:1])
    two = reconstruct(truth.images[:2], [3, 1])
    scores = score(two, truth, {"images": ImageAid(fill=guess)})
    assert scores.assignment == [0, 1, -1, -1]
    assert scores.per_image["psnr"][:2] == [60.0, 60.0]
    unseen = (guess - truth.images[2]).square().mean().sqrt()
    assert scores.per_image["rmse"][2] == pytest.approx(float(unseen), abs=1e-6)
    assert scores["label_accuracy"] == 0.5
    assert torch.equal(align(truth.images[:2], scores.assignment, guess)[3], guess)
    assert scores.missing == 0


def test_without_a_guess_what_is_missing_is_not_scored(truth):
    """No pixels stand for an image that nobody reconstructed."""
    near = (truth.images[[3, 1]] + 0.05).clamp(0, 1)
    labels = truth.labels[[3, 1]]
    answer = reconstruct(near, labels.tolist())
    scores = score(answer, truth)
    assert (scores.assignment, scores.missing) == ([-1, 1, -1, 0], 2)
    alone = score(answer, GroundTruth(images=truth.images[[3, 1]], labels=labels))
    assert scores["psnr"] == pytest.approx(alone["psnr"])
    assert scores.per_image["psnr"] == pytest.approx(alone.per_image["psnr"][::-1])
    assert scores["label_accuracy"] == 0.5
    assert score(reconstruct(truth.images), truth).missing == 0


def test_scores_are_json_values_and_inputs_stay_as_they_were(truth):
    before = truth.images.clone()
    scores = score(reconstruct(truth.images, truth.labels.tolist(), loss=math.inf), truth)
    assert scores["attack_loss"] is None
    assert scores.per_image["psnr"] == [60.0] * 4
    assert list(scores.metrics()) == [*METRICS, "attack_loss"]
    assert torch.equal(before, truth.images)


def test_ssim_without_scikit_image_is_none_with_the_reason(truth, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "skimage.metrics", None)
    scores = score(reconstruct(truth.images), truth)
    assert scores["ssim"] is None
    assert "scikit-image" in scores.notes["ssim"]
    assert scores["psnr"] == 60.0


REFUSED = [
    (lambda t: reconstruct(t.images * 255), "in \\[0, 1\\]"),
    (lambda t: reconstruct(t.images - 0.9), "in \\[0, 1\\]"),
    (lambda t: reconstruct(t.images.clone().fill_(math.nan)), "non-finite"),
    (lambda t: reconstruct((t.images * 255).byte()), "floating-point"),
    (lambda t: reconstruct(t.images[:, :1]), "are \\(1, 12, 10\\) each"),
    (lambda t: reconstruct(t.images[0]), "shape \\(N, C, H, W\\)"),
    (lambda t: reconstruct(t.images[:0]), "shape \\(N, C, H, W\\)"),
    (lambda t: reconstruct(t.images, [1, 2]), "do not belong together"),
    (lambda t: reconstruct(features=torch.full((4, 6), math.inf)), "not finite"),
    (lambda t: reconstruct(features=torch.ones(4, 5)), "are \\(5,\\) each"),
    (lambda t: reconstruct(features=torch.ones(4)), "shape \\(N, d\\)"),
    (lambda t: Reconstruction(labels=torch.ones(4), loss=0.0, iterations=1), "integer labels"),
    (lambda t: reconstruct(), "empty"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_refused(make, message, truth):
    with pytest.raises(ScoringError, match=message):
        score(make(truth), truth)
