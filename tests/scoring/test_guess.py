"""The zero-information guess, on public images for which the best one is known."""

import math
from dataclasses import replace

import pytest
import torch

from fedsim.scoring import Guesser, ScoringError, near_copies, score
from fedsim.scoring.guess import mean_image
from fedsim.targets.images import ImageAid
from fedsim.types import GroundTruth, Reconstruction


def flat(levels):
    """(N, 1, 8, 8), uint8: an image of each level."""
    return torch.tensor(levels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).clone()


def truth(images, labels=None):
    known = torch.zeros(len(images)) if labels is None else torch.tensor(labels)
    return GroundTruth(images=images.float() / 255, labels=known.long())


def smooth(count, seed):
    """(N, 1, 8, 8), uint8: a brightness each, and noise."""
    stream = torch.Generator().manual_seed(seed)
    brightness = 60 + 130 * torch.rand(count, 1, 1, 1, generator=stream)
    return (brightness + 20 * torch.randn(count, 1, 8, 8, generator=stream)).clamp(0, 255).byte()


def psnr(images, of):
    return score(Reconstruction(images=images, loss=0.0, iterations=0), truth(of))["psnr"]


@pytest.fixture(scope="module")
def guesser():
    return Guesser(smooth(400, 0), torch.zeros(400, dtype=torch.int64))


def test_the_mean_image_is_the_mean():
    pool = torch.tensor([[0, 255], [100, 155]], dtype=torch.uint8).view(2, 1, 1, 2)
    expected = torch.tensor([50 / 255, 205 / 255])
    assert torch.allclose(mean_image(pool).flatten(), expected, atol=1e-6)


def test_a_batch_is_guessed_by_different_images_each_matched_once():
    guess = Guesser(flat([20] * 50 + [220] * 50), torch.zeros(100).long())(2)
    assert sorted((guess.images[:, 0, 0, 0] * 255).round().tolist()) == [20, 220]
    both, one = truth(flat([220, 20])), truth(flat([220, 220]))
    assert score(guess.answer(), both)["psnr"] == 60.0
    assert score(guess.answer(), one)["psnr"] == pytest.approx(
        (60 - 20 * math.log10(200 / 255)) / 2, abs=0.01
    )
    assert score(guess.answer(), both)["attack_loss"] is None


@pytest.mark.parametrize("count", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16))])
def test_it_beats_the_mean_image_at_evenly_spaced_brightness(guesser, count):
    """What knows nothing but the images' brightness on average must not gain over it."""
    levels = smooth(400, 0).double().flatten(1).mean(1)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    shift = (levels.quantile(places) - levels.mean()).float() / 255
    spaced = (guesser.mean + shift.view(-1, 1, 1, 1)).clamp(0, 1)
    guess = guesser(count)
    batches = [smooth(count, seed) for seed in range(1, 100)]

    def mean_psnr(images):
        return sum(psnr(images, batch) for batch in batches) / len(batches)

    guessed = mean_psnr(guess.images)
    assert mean_psnr(spaced) - guessed < 0.05
    plain = mean_psnr(guesser.mean.expand_as(guess.images))
    assert guessed - plain > 1, "matching is worth something"


def test_what_is_filled_in_lets_nothing_gain(guesser):
    """An answer of fewer images, which know nothing either, has no more than the guess."""
    guess = guesser(4)
    batches = [smooth(4, seed) for seed in range(1, 100)]
    whole = sum(psnr(guess.images, batch) for batch in batches)
    aids = {"images": ImageAid(fill=guesser.mean)}
    for kept in (1, 2, 3):
        part = Reconstruction(images=guess.images[:kept], loss=0.0, iterations=0)
        assert sum(score(part, truth(batch), aids)["psnr"] for batch in batches) < whole, kept


def test_known_labels_are_used_and_answered():
    left, right = flat([0] * 60), flat([0] * 60)
    left[..., :4], right[..., 4:] = 200, 200
    labels = torch.tensor([3] * 60 + [1] * 60)
    guesser = Guesser(torch.cat([left, right]), labels)
    victims = truth(torch.stack([left[0], right[0], left[0]]), [3, 1, 3])
    for known in ([3, 1, 3], [1, 3, 3]):
        metrics = score(guesser(3, known).answer(), victims)
        assert metrics["psnr"] == 60.0 and metrics["label_accuracy"] == 1.0
    assert score(guesser(1, [3]).answer(), truth(left[:1], [3]))["psnr"] == 60.0
    untold = score(guesser(1).answer(), truth(left[:1], [3]))
    assert untold["psnr"] is not None and untold["psnr"] < 20
    assert guesser(1, [3]).name in ("class_means", "learned_class_means")
    assert guesser(2, [3, 7]).labels.tolist() == [3, 7], "a label without a public image"


@pytest.mark.parametrize(
    ("shares", "count", "expected"),
    [
        ([5, 5, 5, 5], 4, [0, 1, 2, 3]),
        ([18, 2], 2, [0, 0]),
        ([14, 3, 3], 3, [0, 0, 1]),
        ([0, 4, 4], 1, [1]),
    ],
)
def test_labels_alone_are_guessed_as_a_multiset(shares, count, expected):
    """Of which the overlap with labels that are drawn is largest, on average."""
    labels = torch.arange(len(shares)).repeat_interleave(torch.tensor(shares))
    guess = Guesser(flat([100] * sum(shares)), labels)(count)
    assert guess.labels.tolist() == expected
    known = truth(flat([100] * count), expected)
    assert score(replace(guess.answer(), images=None), known)["label_accuracy"] == 1.0


def test_a_few_public_images_are_not_taken_for_the_victims():
    """Learned of single images, a guess would be those: other images show that it is worse."""
    stream = torch.Generator().manual_seed(3)
    noise = (torch.rand(8, 1, 8, 8, generator=stream) * 255).byte()
    guess = Guesser(noise, torch.zeros(8).long())(4)
    other = truth((torch.rand(4, 1, 8, 8, generator=stream) * 255).byte())
    value = score(guess.answer(), other)["psnr"]
    assert value is not None and value > 9.5, "single images of noise have 7.8 dB, their mean 10.8"


def test_of_the_same_images_a_guess_is_learned_once():
    images, labels = smooth(60, 3), torch.arange(60) % 3
    again = Guesser(images.clone(), labels.clone())
    assert Guesser(images, labels)(2) is again(2)
    for other in (Guesser(images.flip(0), labels), Guesser(images, labels.flip(0))):
        assert other != again and other(2) is not again(2)


@pytest.mark.slow
def test_it_does_not_depend_on_threads():
    pool, labels = smooth(300, 5), torch.arange(300) % 3
    before, guesses = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            guesser = Guesser(pool, labels)
            # Past the call that sets them itself.
            guesses.append([guesser._learn(5, None).images, guesser._learn(4, (0, 1, 1, 2)).images])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*guesses, strict=True):
        assert torch.equal(one, other)


def test_it_says_what_is_wrong():
    with pytest.raises(ScoringError, match="needs a public image"):
        Guesser(flat([]), torch.zeros(0).long())
    with pytest.raises(ScoringError, match="needs 2 labels, got 1"):
        Guesser(flat([1, 2]), torch.zeros(2).long())(2, [0])
    guess = Guesser(flat([100]), torch.zeros(1).long())(1)
    assert guess.name == "mean_image", "of one public image nothing can be learned"


def test_near_copies_are_told_from_other_images():
    stream = torch.Generator().manual_seed(3)
    public = torch.randint(0, 256, (6, 3, 32, 32), generator=stream, dtype=torch.uint8)
    others = torch.rand(4, 3, 32, 32, generator=stream)
    exact = public[2:3].float() / 255
    darker = 0.2 + 0.4 * public[4:5].float() / 255
    noisy = public[5:6].float() / 255 + 0.02 * torch.randn(1, 3, 32, 32, generator=stream)
    black = torch.zeros(1, 3, 32, 32)
    assert near_copies(others, public) == 0
    assert near_copies(torch.cat([others, exact, darker, noisy, black]), public) == 3
    assert near_copies(black, torch.zeros(2, 3, 32, 32, dtype=torch.uint8)) == 0
    mixed = 0.8 * exact + 0.2 * others[:1]
    assert near_copies(mixed, public) == 0
