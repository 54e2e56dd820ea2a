"""Certificates of an ordinary classifier's features: none that is false, whatever is wrong."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ordinary_classifier import classifier_gradient, search
from torch import Tensor

from fedsim import rng
from fedsim.scoring import false_certificates
from fedsim.types import UNKNOWN, Effect, GroundTruth
from fedsim_attacks.classifier_features import _certificates
from fedsim_attacks.classifier_features._profile import Consistency, Profile

DIMENSION = 24
slow = partial(pytest.param, marks=pytest.mark.slow)


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a client computes from, and its classifier; features of ReLU, alike as real ones are."""

    features: Tensor
    labels: Tensor
    weights: Tensor
    biased: bool = True

    @property
    def whole(self):
        """Features with the constant that the bias is a weight of."""
        return F.pad(self.features, (0, 1), value=1.0) if self.biased else self.features

    @property
    def gradient(self):
        """∂L/∂[W b] in float32."""
        logits = self.whole @ self.weights.T
        errors = logits.softmax(1) - F.one_hot(self.labels, len(self.weights))
        return errors.T @ self.whole / len(self.labels)


def client(count, seed, classes=10, biased=True):
    stream = rng.generator(seed, "certificates", count)
    common = torch.rand(DIMENSION, generator=stream)
    features = (common + 0.5 * torch.randn(count, DIMENSION, generator=stream)).relu()
    weights = torch.randn(classes, DIMENSION + biased, generator=stream) / DIMENSION**0.5
    labels = torch.randint(classes, (count,), generator=stream)
    return Client(features=features, labels=labels, weights=weights, biased=biased)


def answer(known, gradient=None, *, effect=None):
    """The attack's answer to a gradient, from the right labels on."""
    observed = known.gradient if gradient is None else gradient
    classifier = classifier_gradient(
        known.weights, observed, len(known.labels), biased=known.biased, effect=effect
    )
    stream = rng.generator(1, "attack")
    pool = torch.randn(64, DIMENSION, generator=stream).relu()
    problem = Profile(classifier) if classifier.factors <= 1 else Consistency(classifier)
    labels = known.labels.sort()[0]
    return search(problem, pool, labels, stream, starts=2, exchanges=2)


def counted(found, known):
    """How many images are certified, and how many of these wrongly."""
    assert not bool((found.certified & ~found.determined).any())
    images = torch.zeros(len(known.labels), 1, 1, 1)
    truth = GroundTruth(images=images, labels=known.labels, features=known.features)
    wrong = false_certificates(found, truth)
    return int(found.certified.sum()), wrong


@pytest.mark.parametrize(("seeds", "counts"), [(1, (1, 4, 9)), slow(7, range(1, 10))])
def test_nearly_all_images_are_certified_and_none_falsely(seeds, counts):
    """At seven seeds, 315 images."""
    total = right = 0
    for seed in range(seeds):
        for count in counts:
            known = client(count, seed)
            certified, wrong = counted(answer(known), known)
            assert wrong == 0, (seed, count)
            total, right = total + count, right + certified
    assert total == sum(counts) * seeds
    assert right >= 0.9 * total


@pytest.mark.slow
def test_clipping_leaves_certificates_and_what_is_not_declared_none():
    known = client(4, 1)
    assert counted(answer(known, 0.3 * known.gradient, effect=Effect(scaled=True)), known) == (4, 0)
    assert counted(answer(known, 0.3 * known.gradient), known)[0] == 0
    assert counted(answer(known, effect=UNKNOWN), known)[0] == 0
    assert counted(answer(known, effect=Effect(rounded=True)), known)[0] == 0


@pytest.mark.parametrize("share", [slow(1e-6), 1e-5, *map(slow, (1e-4, 1e-3, 1e-2, 1e-1))])
def test_noise_that_nobody_declares_is_noticed(share):
    for seed in range(2):
        known = client(6, seed)
        gradient = known.gradient
        noise = torch.randn(gradient.shape, generator=rng.generator(seed, "noise"))
        if seed % 2:  # such as keeps the sum of each column, by which noise is measured
            noise -= noise.mean(0)
        found = answer(known, gradient + share * gradient.square().mean().sqrt() * noise)
        assert counted(found, known)[1] == 0
        if share >= 1e-5:
            assert counted(found, known)[0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("told", [True, False])
def test_short_types_give_no_false_certificate(dtype, told):
    for count in (1, 3, 6, 9):
        known = client(count, 2)
        sent = known.gradient.to(dtype)
        certified, wrong = counted(answer(known, sent if told else sent.float()), known)
        assert wrong == 0
        assert told or not certified


@pytest.mark.parametrize("rate", [1e-6, *map(slow, (1e-4, 1e-2, 1.0))])
def test_steps_taken_for_one_give_no_false_certificate(rate):
    """Three steps, whose mean gradient is taken for that of one."""
    for count in (1, 2, 5):
        known = stepped = client(count, 3)
        mean = torch.zeros_like(known.gradient)
        for _ in range(3):
            mean += stepped.gradient / 3
            stepped = replace(stepped, weights=stepped.weights - rate * stepped.gradient)
        certified, wrong = counted(answer(known, mean), known)
        assert wrong == 0
        assert rate < 1e-2 or not certified


def two_lengths(classes):
    """Two images without a bias that give one gradient: t (1 - p(t)) has each value twice."""
    direction = F.normalize(torch.ones(DIMENSION), dim=0)
    weights = -direction.expand(classes, -1).clone()
    weights[0] = direction

    def pull(length):
        logits = length * (weights.double() @ direction.double())
        return length * float(1 - logits.softmax(0)[0])

    highest = max((step / 100 for step in range(1, 800)), key=pull)
    short, low, high = 0.6 * highest, highest, 20.0
    wanted = pull(short)
    assert pull(low) > wanted > pull(high)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if pull(middle) > wanted else (low, middle)
    label = torch.zeros(1, dtype=torch.int64)
    first, second = (
        Client(features=(t * direction)[None], labels=label, weights=weights, biased=False)
        for t in (short, low)
    )
    return first, second


@pytest.mark.parametrize("classes", [2, 10])
def test_two_images_of_one_gradient_are_not_certified(classes):
    """Of ten classes nine are alike, so that equations seem to be left over."""
    for known, other in (two_lengths(classes), two_lengths(classes)[::-1]):
        torch.testing.assert_close(known.gradient, other.gradient, rtol=1e-4, atol=1e-6)
        for gradient in (known.gradient, other.gradient):
            assert counted(answer(known, gradient), known)[0] == 0


def test_two_labelings_of_one_gradient_are_not_certified():
    """An untrained classifier of zeros and as many images as classes but one."""
    known = replace(client(9, 4, biased=False), labels=torch.arange(9))
    known = replace(known, weights=torch.zeros_like(known.weights))
    features = known.features.clone()
    features[:8] -= features[8]
    features[8] *= -1
    other = replace(known, features=features, labels=torch.tensor([*range(8), 9]))
    torch.testing.assert_close(known.gradient, other.gradient, rtol=1e-4, atol=1e-6)
    assert counted(answer(known), known)[0] == 0


@pytest.mark.slow
def test_equal_images_and_vanished_signals_are_told_apart():
    known = client(5, 5)
    same = replace(known, features=known.features.clone(), labels=known.labels.clone())
    same.features[1], same.labels[1] = same.features[0], same.labels[0]
    certified, wrong = counted(answer(same), same)
    assert wrong == 0 and certified <= 3
    sure = replace(known, weights=60 * known.weights)
    sure = replace(sure, labels=(sure.whole @ sure.weights.T).argmax(1))
    assert counted(answer(sure), sure)[1] == 0


def test_an_image_that_is_not_there_is_not_certified():
    """One image, and the same one twice, have one gradient."""
    for seed in range(6):
        known = client(1, seed)
        twice = {"features": known.features.repeat(2, 1), "labels": known.labels.repeat(2)}
        believed = replace(known, **twice)
        assert counted(answer(believed), known)[1] == 0


@pytest.mark.slow
def test_what_lies_outside_the_row_space_forbids_a_certificate():
    """As of an image more than the attacker believes, whose part is small."""
    known = client(4, 6)
    gradient = known.gradient
    outside = torch.linalg.svd(gradient.double())[2][-1].float()
    left = torch.linalg.svd(gradient.double())[0][:, 5].float()
    # Its left vector sums to 0 as an error signal does, or else the columns' sums would show it.
    left -= left.mean()
    changed = gradient + 1e-4 * gradient.norm() * torch.outer(left, outside)
    assert counted(answer(known), known)[0] == 4
    assert counted(answer(known, changed), known)[0] == 0


@pytest.mark.parametrize(
    ("rule", "loosened", "law"),
    [
        slow(
            "is_declared",
            lambda _: True,
            test_clipping_leaves_certificates_and_what_is_not_declared_none,
        ),
        ("_ROUNDING", 400.0, partial(test_noise_that_nobody_declares_is_noticed, 1e-5)),
        (
            "_are_in_all_rivals",
            lambda *_: True,
            partial(test_two_images_of_one_gradient_are_not_certified, 10),
        ),
        ("_stand_apart", lambda *_: True, test_an_image_that_is_not_there_is_not_certified),
    ],
    ids=["declared", "reproduced", "no rival", "apart"],
)
def test_each_rule_is_needed(rule, loosened, law, monkeypatch):
    monkeypatch.setattr(_certificates, rule, loosened)
    with pytest.raises(AssertionError):
        law()


@pytest.mark.parametrize("gap", [slow(6.0), slow(8.0), 15.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_classes_that_no_image_is_taken_for_prove_nothing(gap, dtype):
    """Of ten classes two are likely: as with two classes, an unknown factor mixes two images.

    The more alike these are, the less is left of the others' rows.
    """
    for seed, distance in ((0, 1.0), (1, 1.0), (2, 0.3), (3, 0.1)):
        known = client(2, seed)
        shared = known.features.mean(0)
        known = replace(known, features=shared + distance * (known.features - shared))
        weights = known.weights.clone()
        weights[2:, -1] -= gap
        known = replace(known, weights=weights, labels=torch.zeros(2, dtype=torch.long))
        believed = replace(known, labels=known.labels[:1])
        gradient = (0.3 * known.gradient).to(dtype)
        found = answer(believed, gradient, effect=Effect(scaled=True))
        assert not bool(found.certified.any())
