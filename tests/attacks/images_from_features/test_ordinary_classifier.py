"""Images behind an ordinary classifier: its features carry the inversion, where it tells them."""

from dataclasses import replace

import pytest
import torch

from fedsim.attacking.jobs import hide_defenses
from fedsim.attacking.knowledge import questions
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Photos
from fedsim.models.base import normalize
from fedsim.rng import generator
from fedsim.scoring import score
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Profile
from fedsim_attacks.gradient_matching._image_priors import KnownFeatures
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients
from fedsim_attacks.images_from_features._body_gradient import PartGradient, WholeGradient
from fedsim_attacks.images_from_features._heads import recover, signals
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion, _Phases
from fedsim_attacks.images_from_features.feature_inversion import FeatureInversion
from fedsim_attacks.labels.label_inference import LabelInference
from fedsim_attacks.patch_embedding.patch_inversion import PatchInversion

MODEL = {"model": "convnet", "model_parameters": {"width": 8}}
RESNET = {
    "model": "resnet18",
    "model_parameters": {"stem": "imagenet", "norm": "group", "width": 8},
}
"""Its last stages meet maps of single pixels, of images of 32x32."""


def observe(*defense, count=1):
    return make_observation(*example_batch(count), **MODEL, defense=list(defense))


def test_the_directions_of_all_tensors_and_features_are_compared():
    observation, truth = observe({"name": "clip", "norm": 1e-3}, count=3)

    def evaluated(images, weight):
        objective = WholeGradient(
            observation,
            truth.labels,
            width=0,
            calls=1,
            features=KnownFeatures(truth.features, "relative"),
            weight=weight,
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


CUT = {"name": "percentile_privacy", "gamma": 1e-3}
"""Cuts the bias's gradient of the label's class."""
STEPS = {"name": "local_aggregation", "steps": 2, "batches": "same"}
BLIND = Grant(labels="inferred")


def answer(attack, seen, truth):
    (asked,) = questions(attack, seen, truth, BLIND, 0)
    return asked.answer(None).reconstruction


@pytest.mark.parametrize(
    ("defense", "features"),
    [
        ({"name": "percentile_privacy", "gamma": 0.02}, None),
        ({"name": "oasis"}, 1e-4),
        ({"name": "gradient_pruning", "ratio": 0.5}, 1e-4),
        ({"name": "soteria", "ratio": 0.5}, 0.05),
    ],
    ids=str,
)
def test_what_is_known_of_a_defense_explains_the_update_at_the_truth(defense, features):
    """Taken for an undefended one, the update of the true images is another, and so are features.

    But features that a cut has shortened are not known.
    """
    seen, truth = observe(defense)
    blind = hide_defenses(seen)
    recovered = recover(blind, Knowledge(), 0).features

    def misfit(compared):
        phases = _Phases(blind, compared, recovered, 0, FactoredInversion(jump_width=0))
        return phases.present.misfit(normalize(truth.images, seen.model))

    knowing = misfit(seen)
    assert float(knowing.update) < 1e-6 < 1e-3 < float(misfit(blind).update)
    assert features is None or float(knowing.features) < features


def test_what_a_model_draws_is_fitted_beside_the_images():
    seen, truth = observe({"name": "precode"})
    misfit = WholeGradient(seen, truth.labels, width=0, calls=60)
    images = normalize(truth.images, seen.model)
    first, *_, last = (float(misfit(images).update) for _ in range(60))
    assert last < first / 3


def test_weak_noise_leaves_the_directions_of_tensors():
    seen, truth = observe({"name": "gaussian_noise", "std": 1e-3})
    attack = FactoredInversion(iterations=3)
    knowing, blind = (answer(attack, each, truth) for each in (seen, hide_defenses(seen)))
    assert torch.equal(knowing.images, blind.images)
    assert torch.equal(knowing.labels, blind.labels)
    # But what it says of its features is not certain.
    assert knowing.certified is None and knowing.determined is None


@pytest.mark.parametrize(
    ("attack", "defenses", "model"),
    [
        (LabelInference(), [CUT], MODEL),
        (FactoredInversion(iterations=3), [STEPS, CUT], MODEL),
        (FeatureInversion(iterations=2, width=8, features_from="none"), [CUT], MODEL),
        (FeatureInversion(iterations=2, width=8), [{**CUT, "gamma": 0.02}], MODEL),
        (PatchInversion(), [{**CUT, "gamma": 0.02}], {"model": "vit"}),
    ],
    ids=["label_inference", "several steps", "no features", "features", "patches"],
)
def test_signs_of_truncated_entries_say_the_label(attack, defenses, model):
    seen, truth = make_observation(*example_batch(1), **model, defense=defenses)
    assert torch.equal(answer(attack, seen, truth).labels, truth.labels)


def test_features_that_explain_little_do_not_choose_a_single_image_s_label():
    seen, truth = observe()
    assert not torch.equal(signals(seen, -truth.features).labels, truth.labels)
    phases = _Phases(seen, seen, -truth.features, 0, FactoredInversion(iterations=3))
    assert torch.equal(phases.present.labels, truth.labels)


def test_noise_that_no_sum_shows_leaves_a_spread():
    """As behind other views of an image: signals of two classes still sum to 0 exactly."""
    stream = generator(0, "spread")
    weights, inputs = (torch.randn(2, 6, generator=stream).double() for _ in range(2))
    errors = torch.tensor([0.5, -0.5]).double()
    read = ClassifierGradient.read(observe({"name": "oasis"})[0])
    gradient = errors[:, None] * inputs[:1]
    problem = Profile(
        replace(read, weights=weights, gradient=gradient, biased=False, noisy=True, exact=False)
    )
    assert not problem.classifier.deviation
    found = problem.spread(problem.unknowns(inputs[None, :1])[0], torch.tensor([1]))
    assert torch.isfinite(torch.tensor(found))


def test_a_body_may_end_in_a_bias_that_no_image_moves():
    seen, truth = observe({"name": "precode"})
    known = signals(seen, truth.features)
    objective = PartGradient.of_body(seen, known, weight=1.0, width=1.0, calls=1)
    slope = objective(normalize(truth.images, seen.model)).slope
    assert bool(slope.isfinite().all()) and bool(slope.any())
