"""Anybody's body is cut where fedsim's own of the same layers is, whatever its code looks like."""

import pytest
import torch
import torch.nn.functional as F
from deep_victims import observe
from torch import nn

import fedsim
from fedsim import rng
from fedsim_attacks.images_from_features._body_gradient import Body
from fedsim_attacks.images_from_features._stages import _cut_into_stages

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


class Shortcut(nn.Module):
    """What `Written` does between its second convolution and its fourth."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return hidden + self.layer(hidden)


def in_sequence(model):
    return nn.Sequential(
        nn.Sequential(model.first, nn.ReLU(), nn.MaxPool2d(2)),
        model.second,
        nn.ReLU(),
        Shortcut(model.third),
        nn.ReLU(),
        model.fourth,
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        model.classifier,
    )


def seen(model, side=SIDE):
    stream = rng.generator(0, "update")
    update = {n: torch.randn(p.shape, generator=stream) for n, p in model.named_parameters()}
    return fedsim.observe(
        model, update, input_shape=(3, side, side), classes=CLASSES, batch_size=2, mode="eval"
    )


def cut(observation, width=0.0):
    return _cut_into_stages(Body(observation, width), 2, rng.generator(0, "stages"))


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_functions_are_cut_as_the_same_layers_in_sequence(width):
    torch.manual_seed(0)
    model = Written()
    own, listed = (cut(seen(each), width) for each in (model, in_sequence(model)))
    assert len(own) > 2
    entering = torch.rand(2, 3, SIDE, SIDE)
    for one, other in zip(own, listed, strict=True):
        assert (one.shape, one.positive) == (other.shape, other.positive)
        values = [{p.shape for _, p in stage.part.parameters} for stage in (one, other)]
        assert values[0] == values[1]
        with torch.no_grad():
            made = [stage.part.function(entering) for stage in (one, other)]
        torch.testing.assert_close(made[0].flatten(1), made[1].flatten(1))
        entering = made[0]


def test_a_librarys_resnet_is_cut_as_fedsims():
    from torchvision import models

    model = models.resnet18(num_classes=CLASSES)
    observation, _ = observe([], 2, "eval", norm="batch", width=64, head=None)
    own, other = cut(observation), cut(seen(model, 32))
    assert len(own) > 4
    ours, theirs = ([(s.shape, len(s.part.parameters)) for s in stages] for stages in (own, other))
    assert ours == theirs
