"""Honest scores: what made earlier leakage numbers wrong must not come back (rules 6 to 9, 12)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from skimage.metrics import structural_similarity
from torch import Tensor, nn

from fedsim.models.base import denormalize, normalize
from fedsim.scoring import LpipsMetric, ScoringError, Unavailable, load_lpips, psnr, score
from fedsim.targets.images import ImageAid
from fedsim.types import GroundTruth, ModelSpec, Reconstruction


def pixels(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def truth(images: Tensor) -> GroundTruth:
    return GroundTruth(images=images, labels=torch.arange(len(images)))


def found(images: Tensor, labels: Tensor | None = None) -> Reconstruction:
    return Reconstruction(images=images, labels=labels, loss=0.0, iterations=1)


def test_one_good_guess_counts_once() -> None:
    """Rule 6: the assignment is bijective, so one reconstruction serves one truth."""
    victims = pixels(1).repeat(4, 1, 1, 1) + torch.linspace(0, 1e-3, 4).view(4, 1, 1, 1)
    victims = victims.clamp(0, 1)
    junk = 1 - victims
    scores = score(found(torch.cat([victims[:1], junk[1:]])), truth(victims))
    assert sorted(scores.assignment) == [0, 1, 2, 3]
    assert sum(value > 50 for value in scores.per_image["psnr"]) == 1


def test_poor_images_hide_neither_labels_nor_features() -> None:
    """Every target counts by itself: exact features and labels are read, whatever was drawn."""
    victims, stream = pixels(8), torch.Generator().manual_seed(9)
    features = torch.randn(8, 16, generator=stream)
    known = GroundTruth(images=victims, labels=torch.arange(8), features=features)
    order = torch.randperm(8, generator=stream)
    answer = Reconstruction(
        images=pixels(8).flip(0).roll(3, 0),
        labels=torch.arange(8)[order],
        features=2 * features[order],
        loss=0,
        iterations=1,
    )
    scores = score(answer, known)
    assert scores["label_accuracy"] == 1.0
    assert scores["feature_cosine"] == pytest.approx(1.0)
    assert scores.assignments["features"] == order.argsort().tolist() != scores.assignment


def test_every_metric_of_images_uses_the_same_pairs() -> None:
    """Rule 6: one assignment by one cost; structure follows the pixels."""
    victims = pixels(2)
    # By pixels each belongs to the truth of its own index; labels and features say otherwise.
    near = torch.stack([0.97 * victims[0] + 0.03 * victims[1], victims[1]])
    features = torch.eye(2)
    known = GroundTruth(images=victims, labels=torch.tensor([0, 1]), features=features)
    swapped = Reconstruction(
        images=near, labels=torch.tensor([1, 0]), features=features.flip(0), loss=0, iterations=1
    )
    scores = score(swapped, known)
    assert scores.assignment == [0, 1]
    assert scores["label_accuracy"] == 1.0
    assert scores["feature_cosine"] == pytest.approx(1.0)

    # Truth 0 is dark and truth 1 bright; the brightened truth 0 is, by pixels, nearest to truth 1.
    dark, bright = 0.4 * victims[0], 0.6 + 0.4 * victims[1]
    brightened, flat = dark + 0.6, torch.full_like(dark, 0.2)
    images = torch.stack([dark, bright])
    scores = score(found(torch.stack([brightened, flat])), truth(images))
    pairs = torch.stack([flat, brightened])
    expected = [
        structural_similarity(a.double().numpy(), b.double().numpy(), data_range=1, channel_axis=0)
        for a, b in zip(pairs, images, strict=True)
    ]
    assert scores.assignment == [1, 0]
    assert scores.per_image["ssim"] == pytest.approx(expected)
    assert scores["ssim"] == pytest.approx(sum(expected) / 2)
    assert sum(expected) / 2 < 0.2  # structure alone would have paired the brightened one with 0


def test_guesses_beyond_the_batch_are_not_chosen_by_the_truth() -> None:
    """Rule 6 and 1: handing in many candidates does not let the truth pick the best of them."""
    victims = pixels(2)
    junk = pixels(2, seed=9)
    assert score(found(torch.cat([junk, victims])), truth(victims))["psnr"] == pytest.approx(
        score(found(junk), truth(victims))["psnr"]
    )


def test_psnr_is_per_image_and_a_perfect_image_does_not_swallow_the_mean() -> None:
    """Rule 7: per image, capped at 60 dB, then the mean; not the batch's pooled error."""
    victims = pixels(2) * 0.5
    scores = score(found(torch.stack([victims[0], victims[1] + 0.1])), truth(victims))
    assert scores.per_image["psnr"] == pytest.approx([60.0, 20.0], abs=1e-3)
    assert scores["psnr"] == pytest.approx(40.0, abs=1e-3)  # pooled it would be 23.0
    assert psnr(victims, victims).tolist() == [60.0, 60.0]


SPEC = ModelSpec(
    name="any",
    parameters={},
    input_shape=(3, 16, 16),
    num_classes=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.2, 0.2, 0.2),
)


def test_normalized_tensors_are_refused_not_scored() -> None:
    """Rule 8: only pixels in [0, 1] are scored; normalized or unclamped tensors are refused."""
    victims = pixels(2)
    recovered = normalize(victims, SPEC) + 0.3
    with pytest.raises(ScoringError, match=r"in \[0, 1\]"):
        score(found(recovered), truth(victims))
    with pytest.raises(ScoringError, match=r"in \[0, 1\]"):
        score(found(denormalize(recovered, SPEC) + 0.2), truth(victims))
    with pytest.raises(ScoringError, match=r"in \[0, 1\]"):
        score(found(victims), truth(normalize(victims, SPEC)))
    assert score(found(denormalize(recovered, SPEC).clamp(0, 1)), truth(victims))["psnr"]


def test_the_data_range_is_one_and_not_that_of_the_images() -> None:
    """Rule 8: a dark image is no easier to reconstruct than a bright one."""
    dark = pixels(1) * 0.1
    shifted = score(found(dark + 0.05), truth(dark))
    assert shifted["psnr"] == pytest.approx(26.02, abs=0.01)  # by the image's own range: 6 dB
    bright = score(found(dark + 0.8), truth(dark + 0.75))
    assert bright["psnr"] == pytest.approx(shifted["psnr"], abs=1e-3)
    assert shifted["rmse"] == pytest.approx(0.05, abs=1e-6)  # a mean, not a sum
    flat = torch.full((1, 3, 16, 16), 0.5)
    noise = 0.02 * (pixels(1) - 0.5)
    similarity = score(found(flat + noise), truth(flat))["ssim"]
    c2 = 0.03**2  # (0.03 x data range)^2; with the image's own range it would be 25 times less
    expected = c2 / (float(noise.var()) + c2)
    assert similarity == pytest.approx(expected, abs=0.02)


def test_a_batch_twice_as_large_has_the_same_scores() -> None:
    """Rule 8: averages, not sums."""
    victims = pixels(3)
    guess = (victims + 0.1).clamp(0, 1)
    once = score(found(guess), truth(victims))
    twice = score(found(guess.repeat(2, 1, 1, 1)), truth(victims.repeat(2, 1, 1, 1)))
    for name in ("rmse", "psnr", "ssim"):
        assert twice[name] == pytest.approx(once[name])


class RangeProbe(nn.Module):
    """Stands in for the network and keeps what it is fed."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        self.fed = (a, b)
        return (a - b).abs().mean(dim=(1, 2, 3), keepdim=True)


def test_lpips_is_fed_minus_one_to_one() -> None:
    """Rule 9: pixels in [0, 1] reach the network as [-1, 1], at three channels."""
    probe = RangeProbe()
    metric = LpipsMetric("alex", "0" * 64, probe)
    black, white = torch.zeros(1, 1, 32, 32), torch.ones(1, 1, 32, 32)
    scores = score(found(white), truth(black), {"images": ImageAid(lpips=metric)})
    assert probe.fed[0].shape == (1, 3, 32, 32)
    assert {float(probe.fed[0].mean()), float(probe.fed[1].mean())} == {1.0, -1.0}
    assert scores["lpips"] == pytest.approx(2.0)
    assert "32x32" in scores.notes["lpips"]
    assert "alex" in scores.notes["lpips"]


def test_lpips_has_no_pairing_of_its_own() -> None:
    """Rule 6: where pixels pair otherwise than perception would, the pixels decide."""

    class Contrary(nn.Module):
        """Calls images alike that differ most."""

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return 2 - (a - b).abs().mean(dim=(1, 2, 3), keepdim=True)

    victims = torch.stack([torch.full((3, 16, 16), value) for value in (0.1, 0.9)])
    aid = ImageAid(lpips=LpipsMetric("alex", "0" * 64, Contrary()))
    scores = score(found(victims.clone()), truth(victims), {"images": aid})
    assert scores.per_image["lpips"] == pytest.approx([2.0, 2.0])


def test_without_weights_lpips_is_null_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 9: nothing is downloaded and no random backbone takes the weights' place."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("net"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("net"))
    metric = load_lpips("alex")
    assert isinstance(metric, Unavailable)
    victims = pixels(1)
    scores = score(found(victims), truth(victims), {"images": ImageAid(lpips=metric)})
    assert scores["lpips"] is None
    assert "alexnet" in scores.notes["lpips"]
