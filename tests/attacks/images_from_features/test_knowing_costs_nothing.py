"""Knowing what a defense did leaves images and labels as good as taking the update for plain."""

from dataclasses import replace

import pytest
import torch

from fedsim.attacking.jobs import hide_defenses
from fedsim.attacking.knowledge import questions
from fedsim.contracts.grant import Grant
from fedsim.models.base import normalize
from fedsim.rng import generator
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim_attacks.classifier_features._classifier_gradient import ClassifierGradient
from fedsim_attacks.classifier_features._profile import Profile
from fedsim_attacks.images_from_features._body_gradient import PartGradient
from fedsim_attacks.images_from_features._heads import signals
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion, _Phases
from fedsim_attacks.labels.label_inference import LabelInference

MODEL = {"model": "convnet", "model_parameters": {"width": 8}}
CUT = {"name": "percentile_privacy", "gamma": 1e-3}
"""Cuts the bias's gradient of the label's class."""
STEPS = {"name": "local_aggregation", "steps": 2, "batches": "same"}
BLIND = Grant(labels="inferred")


def observe(*defense):
    return make_observation(*example_batch(1), **MODEL, defense=list(defense))


def answer(attack, seen, truth):
    (asked,) = questions(attack, seen, truth, BLIND, 0)
    return asked.answer(None).reconstruction


@pytest.mark.parametrize(
    "defense",
    [
        CUT,
        {"name": "oasis"},
        {"name": "gradient_pruning", "ratio": 0.5},
        {"name": "gaussian_noise", "std": 1e-3},
    ],
    ids=lambda defense: defense["name"],
)
def test_it_answers_what_it_answers_blind(defense):
    seen, truth = observe(defense)
    attack = FactoredInversion(iterations=3)
    knowing, blind = (answer(attack, each, truth) for each in (seen, hide_defenses(seen)))
    assert torch.equal(knowing.images, blind.images)
    assert torch.equal(knowing.labels, blind.labels)
    # But what it says of its features is not certain.
    assert knowing.certified is None and knowing.determined is None


@pytest.mark.parametrize(
    ("attack", "defenses"),
    [(LabelInference(), [CUT]), (FactoredInversion(iterations=3), [STEPS, CUT])],
    ids=["label_inference", "several steps"],
)
def test_signs_of_truncated_entries_say_the_label(attack, defenses):
    seen, truth = observe(*defenses)
    assert torch.equal(answer(attack, seen, truth).labels, truth.labels)


def test_features_that_explain_little_do_not_choose_a_single_image_s_label():
    seen, truth = observe()
    assert not torch.equal(signals(seen, -truth.features).labels, truth.labels)
    phases = _Phases(seen, -truth.features, 0, FactoredInversion(iterations=3))
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
