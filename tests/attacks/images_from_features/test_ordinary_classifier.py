"""Images behind an ordinary classifier: its features carry the inversion, where it tells them."""

import pytest
import torch

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Photos
from fedsim.models.base import normalize
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients
from fedsim_attacks.images_from_features._body_gradient import PartGradient, WholeGradient
from fedsim_attacks.images_from_features._heads import recover, signals
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion
from fedsim_attacks.images_from_features.feature_inversion import FeatureInversion

MODEL = {"model": "convnet", "model_parameters": {"width": 8}}
RESNET = {
    "model": "resnet18",
    "model_parameters": {"stem": "imagenet", "norm": "group", "width": 8},
}
"""Its last stages meet maps of single pixels, of images of 32x32."""


def observe(defense):
    return make_observation(*example_batch(3), **MODEL, defense=defense)


def test_the_directions_of_all_tensors_and_features_are_compared():
    observation, truth = observe([{"name": "clip", "norm": 1e-3}])

    def evaluated(images, weight):
        objective = WholeGradient(
            observation, truth.labels, width=0, calls=1, features=truth.features, weight=weight
        )
        return objective(images)

    at_truth = evaluated(normalize(truth.images, observation.model), 1.0)
    assert abs(float(at_truth.update)) < 1e-5
    assert float(at_truth.features) < 1e-8
    elsewhere = normalize(truth.images.flip(0), observation.model)
    assert float(evaluated(elsewhere, 0.0).update) > 1e-2
    # Features have no jumps, as the update's direction has: their differences tell their slope.
    pull = (evaluated(elsewhere, 2.0).slope - evaluated(elsewhere, 0.0).slope) / 2
    step = 1e-2 * pull / pull.norm()
    after, before = (evaluated(elsewhere + sign * step, 1.0).features for sign in (1, -1))
    assert float(after - before) / 2e-2 == pytest.approx(float(pull.norm()), rel=0.1)


def test_images_come_from_a_classifier_that_starts_at_zero():
    observation, _ = make_observation(*example_batch(2), model="convnet")
    zero = {n: 0 * w if "head.output" in n else w for n, w in observation.parameters.items()}
    observation, _ = make_observation(*example_batch(2), model="convnet", weights=zero)
    found = solve(FactoredInversion(iterations=3), observation, Knowledge(), 0).reconstruction
    assert bool(found.images.isfinite().all())


@pytest.mark.slow
def test_a_few_iterations_are_nearer_than_twice_as_many_of_inverting_gradients():
    photos = Photos().load()
    images = photos.train_images[31:211:60].float() / 255
    observation, truth = make_observation(images, photos.train_labels[31:211:60], **MODEL)
    granted = Knowledge(grant=Grant(labels="inferred"))
    factored, matched = (
        score(solve(attack, observation, granted, seed=1).reconstruction, truth)["psnr"]
        for attack in (FactoredInversion(iterations=80), InvertingGradients(iterations=160))
    )
    assert factored > matched + 1


def observe_residual(classes, count=3, **case):
    images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    labels = torch.arange(count) % classes
    return make_observation(images, labels, num_classes=classes, **RESNET, **case)


@pytest.mark.parametrize(
    ("classes", "defense", "by"),
    [
        (10, [], "classifier_fit"),
        (3, [], "extreme_rays"),
        (2, [], "extreme_rays"),
        (2, [{"name": "clip", "norm": 1e-3}], "extreme_rays"),
    ],
    ids=["ten", "three", "two", "two, clipped"],
)
def test_classes_and_images_decide_what_features_are_by(classes, defense, by):
    observation, truth = observe_residual(classes, defense=defense)
    recovered = recover(observation, Knowledge(), 0)
    assert recovered.features_by == by
    whose = torch.cdist(truth.features, recovered.features).argmin(1)
    known = signals(observation, recovered.features[whose])
    assert known.labels.tolist() == truth.labels.tolist()
    objective = PartGradient.of_body(observation, known, weight=1.0, width=0, calls=1)
    at_truth = objective(normalize(truth.images, observation.model))
    assert float(at_truth.update) < 1e-8
    assert float(at_truth.features) < 1e-8


@pytest.mark.parametrize(
    "attack",
    [FactoredInversion(iterations=4), FeatureInversion(prior="pixel", iterations=2)],
    ids=["factored_inversion", "feature_inversion"],
)
def test_more_images_than_classes_have_their_features_in_the_answer(attack):
    observation, truth = observe_residual(2, 5)
    answer = solve(attack, observation, Knowledge(), 1).reconstruction
    assert answer.features_by == "extreme_rays"
    whose = torch.cdist(truth.features, answer.features).argmin(1)
    assert sorted(whose.tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(answer.features[whose], truth.features, atol=1e-4, rtol=1e-4)
    assert answer.labels[whose].tolist() == truth.labels.tolist()


def test_without_any_layer_that_tells_features_they_are_refused():
    images, labels = example_batch(3)
    observation, _ = make_observation(images, labels % 2, **MODEL, num_classes=2)
    reason = (
        "2 classes determines the features of 1 image at most, and the update is of 3; "
        ".*no linear layer.*; observe smaller batches"
    )
    with pytest.raises(AttackFailed, match=reason):
        solve(FeatureInversion(iterations=1), observation, Knowledge(), 1)


def test_an_image_that_no_layer_shows_leaves_all_features_untold():
    """An image twice in a batch has one direction of the gradient."""
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))[[0, 1, 1]]
    labels = torch.tensor([0, 1, 1])
    observation, truth = make_observation(images, labels, num_classes=2, **RESNET)
    with pytest.raises(AttackFailed, match="determines those of 0, and all are needed"):
        recover(observation, Knowledge(), 0)
    answer = solve(FactoredInversion(iterations=2), observation, Knowledge(), 1).reconstruction
    assert answer.features is None and answer.features_by is None
    assert answer.images is not None and answer.images.shape == truth.images.shape
