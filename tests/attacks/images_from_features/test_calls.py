"""Anybody's body is cut where fedsim's own of the same layers is, whatever its code looks like."""

import pytest
import torch
import torch.nn.functional as F
from deep_victims import observe, staged
from torch import nn

import fedsim
from fedsim import rng

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


def seen(model, side=SIDE):
    stream = rng.generator(0, "update")
    update = {n: torch.randn(p.shape, generator=stream) for n, p in model.named_parameters()}
    return fedsim.observe(
        model, update, input_shape=(3, side, side), classes=CLASSES, batch_size=2, mode="eval"
    )


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_functions_are_cut_between_the_modules_that_they_call(width):
    torch.manual_seed(0)
    body = staged(seen(Written()), width)
    names = [[name.split(".")[-2] for name, _ in s.part.parameters] for s in body.stages]
    print(names, [(tuple(s.shape), s.positive) for s in body.stages])
    images = torch.rand(2, 3, SIDE, SIDE)
    features = body.maps(images)[-1].flatten(1)
    torch.testing.assert_close(features, body.body.model.features(images))


def test_a_librarys_resnet_is_cut_as_fedsims():
    from torchvision import models

    model = models.resnet18(num_classes=CLASSES)
    observation, _ = observe([], 2, "eval", norm="batch", width=64, head=None)
    own, other = (staged(each).stages for each in (observation, seen(model, 32)))
    assert len(own) > 4
    ours, theirs = ([(s.shape, len(s.part.parameters)) for s in stages] for stages in (own, other))
    assert ours == theirs
