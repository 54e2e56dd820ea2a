"""Bodies in stages, peeled or relaxed, and later steps: zero at the truth, and led there."""

import pytest
import torch
import torch.nn.functional as F
from deep_victims import HEAD, VICTIMS, observe, photos, staged
from torch import nn

import fedsim
from fedsim import rng
from fedsim.models.base import normalize
from fedsim.models.local import gradient, loss_function
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.types import LocalTraining
from fedsim_attacks.classifier_features._local_steps import as_one_gradient
from fedsim_attacks.images_from_features._body_gradient import LaterSteps, PartGradient, StageTarget
from fedsim_attacks.images_from_features._heads import signals
from fedsim_attacks.images_from_features._stages import Relaxation


def test_stages_are_the_body():
    observation, truth = observe([])
    body = staged(observation)
    assert len(body.stages) > 4
    names = [name for stage in body.stages for name, _ in stage.part.parameters]
    assert names == [name for name in observation.parameters if name.startswith("body.")]
    found = body.maps(normalize(truth.images, observation.model))
    torch.testing.assert_close(found[-1].flatten(1), truth.features, rtol=1e-4, atol=1e-4)
    assert [stage.shape for stage in body.stages] == [each.shape for each in found[:-1]]
    assert [stage.positive for stage in body.stages] == [False] + [True] * (len(found) - 2)


@pytest.mark.parametrize(
    ("model", "count", "parameters"),
    [
        ("convnet", 64, {}),
        ("resnet18", 2, {"stem": "imagenet", "head": {**HEAD, "unit_features": True}}),
    ],
    ids=["more unknown than known", "features made of what comes out"],
)
def test_what_is_not_determined_is_not_cut(model, count, parameters):
    observation, truth = observe([], count, model=model, **parameters)
    body = staged(observation)
    assert len(body.stages) == 1
    found = body.maps(normalize(truth.images, observation.model))[-1]
    torch.testing.assert_close(found.flatten(1), truth.features, rtol=1e-4, atol=1e-4)


@VICTIMS
def test_every_stage_is_zero_at_the_truth(defense, mode, norm):
    """Outputs, error signals and gradients fit, and each stage poses the one before."""
    # Of two images on maps of one pixel, batch norm in train mode leaves signs.
    observation, truth = observe(defense, 4, mode, norm=norm)
    cut = staged(observation, width=1.0)
    found = cut.maps(normalize(truth.images, observation.model))
    known = signals(observation, truth.features)
    target = StageTarget(truth.features, known.errors, known.scale)
    for i, stage in reversed(list(enumerate(cut.stages))):
        if target.unscaled:  # known up to a factor, which the inputs tell
            target = target._replace(outputs=3 * target.outputs, errors=target.errors / 3)
        gradient = PartGradient(cut.body, stage.part, target, weight=1.0, calls=1)
        right = gradient(found[i])
        assert float(right.update) < 1e-6
        assert float(right.features) < 1e-6
        wrong = gradient(found[i].flip(0))
        assert float(wrong.update) + float(wrong.features) > 1e-3
        target = gradient.pull_back(found[i])


def relaxation(observation, truth, images, maps, steps=1, later=None):
    """And the true images and maps."""
    body, known = staged(observation), signals(observation, truth.features)
    target = StageTarget(truth.features, known.errors, known.scale)
    options = {"noise": 0.0, "later": later, "steps": steps}
    made = Relaxation(body, target, images, maps, **options)
    return made, body.maps(normalize(truth.images, observation.model))


@VICTIMS
def test_relaxed_stages_are_zero_at_the_truth(defense, mode, norm):
    observation, truth = observe(defense, 4, mode, norm=norm)
    images = normalize(truth.images, observation.model)
    right, true = relaxation(observation, truth, images, [])
    misfit = right(images)
    assert float(misfit.update) < 1e-6
    assert float(misfit.features) < 1e-6
    wrong, _ = relaxation(observation, truth, images, [each.flip(0) for each in true[1:-1]])
    assert float(wrong(images).update) > 1e-2


@pytest.mark.parametrize(
    ("defense", "norm"),
    [
        ([], "batch"),
        pytest.param([{"name": "clip", "norm": 1e-3}], "group", marks=pytest.mark.slow),
    ],
)
def test_what_later_steps_add_is_simulated(defense, norm):
    """An update of three steps is no gradient; corrected at the truth, nothing is left of it."""
    observation, truth = observe(defense, 4, norm=norm, steps=3, lr=5e-4)
    images = normalize(truth.images, observation.model)
    later = LaterSteps(observation, truth.labels, 10)
    one = as_one_gradient(observation)
    relaxed, _ = relaxation(one, truth, images, [], steps=10, later=later)
    misfits = [relaxed(images) for _ in range(5)]
    assert [misfit.target_changed for misfit in misfits] == [False] * 4 + [True]
    before = float(misfits[0].update)
    assert before > 1e-3
    # Maps have moved by then: a new one that is corrected at once tells what is left.
    again, _ = relaxation(one, truth, images, [], steps=1, later=later)
    for update in again._updates:
        update.correct(later.share, later(images))
    assert float(again(images).update) < 1e-4 * before


def observe_steps(**training):
    """Four photographs in steps of 0.05."""
    fields = {"algorithm": "fedavg", "steps": 3, "batch_size": 4, "lr": 0.05}
    return make_observation(
        *photos(4),
        model="convnet",
        model_parameters={"width": 8, "head": HEAD},
        training=LocalTraining(**{**fields, "batches": "same", **training}),
    )


@pytest.mark.parametrize(
    ("training", "share"),
    [
        ({}, 1 / 3),
        ({"momentum": 0.9}, 2.71 / (2.71 + 1.9 + 1)),
        ({"steps": 2, "batch_size": 2, "batches": "different"}, 1.0),
    ],
    ids=["same batch", "momentum", "batches of their own"],
)
def test_first_and_later_steps_are_the_update(training, share):
    observation, truth = observe_steps(**training)
    later = LaterSteps(observation, truth.labels, 1)
    assert later.share == pytest.approx(share)
    images = normalize(truth.images, observation.model)
    loss = loss_function(rebuild(observation), dict(observation.buffers), observation.training)
    first, added = gradient(loss, observation.parameters, images, truth.labels), later(images)
    for name, seen in as_one_gradient(observation).update.items():
        if added[name].shape == seen.shape:  # the others leave out what meets padding alone
            made = share * first[name] + added[name]
            # In the norm: single entries differ where a step crosses the kink of a ReLU.
            assert float((made - seen).norm()) < 1e-3 * float(seen.norm())
    assert float(added["body.0.weight"].norm()) > 0.1 * float(first["body.0.weight"].norm())


SIDE, CLASSES = 16, 10


class Written(nn.Module):
    """Functions, a view, a shortcut, in the order of its own code and not of its attributes."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(32 * 16, CLASSES)
        self.fourth = nn.Conv2d(24, 32, 3, padding=1)
        self.third = nn.Conv2d(24, 24, 3, padding=1)
        self.second = nn.Conv2d(12, 24, 3, padding=1)
        self.first = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, images):
        hidden = F.max_pool2d(self.first(images).relu(), 2)
        hidden = F.relu(self.second(hidden))
        hidden = torch.relu(hidden + self.third(hidden))
        hidden = torch.max_pool2d(F.relu(self.fourth(hidden)), 2)
        return self.classifier(hidden.view(len(hidden), -1))


def seen_of(model, side=SIDE):
    stream = rng.generator(0, "update")
    update = {n: torch.randn(p.shape, generator=stream) for n, p in model.named_parameters()}
    return fedsim.observe(
        model, update, input_shape=(3, side, side), classes=CLASSES, batch_size=2, mode="eval"
    )


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_functions_are_cut_between_the_modules_that_they_call(width):
    torch.manual_seed(0)
    body = staged(seen_of(Written()), width)
    names = [{name.split(".")[-2] for name, _ in stage.part.parameters} for stage in body.stages]
    assert names == [{"first"}, {"second"}, {"third"}, {"fourth"}]
    sides = [(stage.shape[1:], stage.positive) for stage in body.stages[1:]]
    assert sides == [((12, 8, 8), True), ((24, 8, 8), True), ((24, 8, 8), True)]
    images = torch.rand(2, 3, SIDE, SIDE)
    features = body.maps(images)[-1].flatten(1)
    torch.testing.assert_close(features, body.body.model.features(images))


def test_a_librarys_resnet_is_cut_as_fedsims():
    from torchvision import models

    model = models.resnet18(num_classes=CLASSES)
    observation, _ = observe([], 2, "eval", norm="batch", width=64, head=None)
    own, other = (staged(each).stages for each in (observation, seen_of(model, 32)))
    assert len(own) > 4
    ours, theirs = ([(s.shape, len(s.part.parameters)) for s in stages] for stages in (own, other))
    assert ours == theirs
