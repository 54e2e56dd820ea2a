"""Anybody's body is cut where fedsim's own of the same layers is, whatever its code looks like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deep_victims import observe
from torch import Tensor, nn

import fedsim
from fedsim import rng
from fedsim.models.victim import rebuild
from fedsim.types import Observation
from fedsim_attacks.images_from_features._body_gradient import Body
from fedsim_attacks.images_from_features._stages import Stage, cut_into_stages

SIDE, CLASSES = 16, 10


class Written(nn.Module):
    """Functions, a view, a shortcut, in the order of its own code and not of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(32 * 16, CLASSES)
        self.fourth = nn.Conv2d(24, 32, 3, padding=1)
        self.third = nn.Conv2d(24, 24, 3, padding=1)
        self.second = nn.Conv2d(12, 24, 3, padding=1)
        self.first = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(self.first(images).relu(), 2)
        hidden = F.relu(self.second(hidden))
        hidden = torch.relu(hidden + self.third(hidden))
        hidden = torch.max_pool2d(F.relu(self.fourth(hidden)), 2)
        logits: Tensor = self.classifier(hidden.view(len(hidden), -1))
        return logits


class Shortcut(nn.Module):
    """What `Written` does between its second convolution and its fourth."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.layer(hidden)
        return added


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        return logits


def in_sequence(model: Written) -> nn.Module:
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


def seen(model: nn.Module, side: int = SIDE) -> Observation:
    stream = rng.generator(0, "update")
    update = {n: torch.randn(p.shape, generator=stream) for n, p in model.named_parameters()}
    return fedsim.observe(
        model, update, input_shape=(3, side, side), classes=CLASSES, batch_size=2, mode="eval"
    )


def cut(observation: Observation, width: float = 0.0) -> list[Stage]:
    return cut_into_stages(Body(observation, width), 2, rng.generator(0, "stages"))


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_functions_are_cut_as_the_same_layers_in_sequence(width: float) -> None:
    torch.manual_seed(0)
    model = Written()
    own, listed, wrapped = (
        cut(seen(each), width) for each in (model, in_sequence(model), Wrapped(in_sequence(model)))
    )
    assert len(own) > 2
    entering = torch.rand(2, 3, SIDE, SIDE)
    for one, other, third in zip(own, listed, wrapped, strict=True):
        assert one.shape == other.shape == third.shape
        assert one.positive == other.positive
        values = [[p for _, p in stage.part.parameters] for stage in (one, other, third)]
        assert {p.shape for p in values[0]} == {p.shape for p in values[1]}
        with torch.no_grad():
            made = [stage.part.function(entering) for stage in (one, other, third)]
        torch.testing.assert_close(made[0].flatten(1), made[1].flatten(1))
        torch.testing.assert_close(made[1], made[2])
        entering = made[0]


@pytest.mark.parametrize("library", ["torchvision", pytest.param("timm", marks=pytest.mark.slow)])
def test_a_librarys_resnet_is_cut_as_fedsims(library: str) -> None:
    torch.manual_seed(0)
    if library == "timm":
        import timm

        model: nn.Module = timm.create_model("resnet18", num_classes=CLASSES)
    else:
        from torchvision import models

        model = models.resnet18(num_classes=CLASSES)
    observation, _ = observe([], 2, "eval", norm="batch", width=64, head=None)
    own, other = cut(observation), cut(seen(model, 32))
    assert len(own) > 4
    assert [stage.shape for stage in own] == [stage.shape for stage in other]
    assert [len(stage.part.parameters) for stage in own] == [
        len(stage.part.parameters) for stage in other
    ]


@pytest.mark.slow
def test_both_roads_lead_to_the_same_images() -> None:
    observation, truth = observe([], 2, "eval", model="convnet", head=None)
    model = rebuild(observation)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.out = model.body, model.head.get_submodule("output")

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.out(self.layers(images).flatten(1))
            return logits

    names = {
        name.replace("body.", "layers.").replace("head.output", "out"): value
        for name, value in observation.update.items()
    }
    spec = observation.model
    again = fedsim.observe(
        Own(),
        names,
        input_shape=spec.input_shape,
        classes=spec.num_classes,
        batch_size=2,
        mean=spec.mean,
        std=spec.std,
        mode="eval",
    )
    given = (truth.images, truth.labels)
    rows = []
    for each in (observation, again):
        _, row = fedsim.attack(each, "factored_inversion", {"iterations": 20}, seed=3, truth=given)
        rows.append((row["metrics"]["psnr"], row["stages"]))
        assert row["simulation_error"] < 1e-4
    assert rows[0][1] == rows[1][1]
    assert rows[0][0] == pytest.approx(rows[1][0], abs=0.05)
