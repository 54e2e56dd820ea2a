"""Tests defenses that change local training: the contract suite of `TrainingDefense`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import (
    TrainingDefense,
    shapes,
)
from fedsim.contracts.guarantee import Guarantee, Mechanism
from fedsim.testing.plugin import PluginContract
from fedsim.testing.updates import (
    copy,
    example_training,
    same,
    stream,
)
from fedsim.types import UNKNOWN, Tensors


class TrainingDefenseContract(PluginContract[TrainingDefense]):
    """Tests what every `TrainingDefense` keeps to."""

    def test_the_training_stays_possible(self) -> None:
        """Counts and rates stay in range, whatever was declared."""
        for declared in (example_training(), example_training(algorithm="fedavg", steps=3)):
            training = self.make().training(declared)
            assert training.steps >= 1
            assert training.batch_size >= 1
            assert training.lr > 0
            assert 0 <= training.dropout < 1
            assert training.algorithm == "fedavg" or training.steps == 1

    def test_names_shapes_and_types_are_kept(self) -> None:
        """The direction of a step is shaped like the parameters, and finite."""
        parameters, images, labels = _example()
        direction = self.make().gradient(_cross_entropy, _plain, 3)
        step = direction(parameters, images, labels, stream())
        assert shapes(step) == shapes(parameters)
        assert {t.dtype for t in step.values()} == {t.dtype for t in parameters.values()}
        assert all(bool(tensor.isfinite().all()) for tensor in step.values())

    def test_arguments_are_not_changed(self) -> None:
        """Neither parameters, nor images, nor labels change."""
        parameters, images, labels = _example()
        before = copy(parameters), images.clone(), labels.clone()
        self.make().gradient(_cross_entropy, _plain, 3)(parameters, images, labels, stream())
        assert same(parameters, before[0])
        assert torch.equal(images, before[1])
        assert torch.equal(labels, before[2])

    def test_same_stream_same_result(self) -> None:
        """The stream that is handed in is the only source of randomness."""
        first, second = (self.make().gradient(_cross_entropy, _plain, 3) for _ in range(2))
        direction = first(*_example(), stream())
        torch.manual_seed(12345)
        assert same(direction, second(*_example(), stream()))

    def test_the_effect_is_declared(self) -> None:
        """The declared noise is that of a step's direction."""
        defense = self.make()
        effect = defense.effect(defense.training(example_training()))
        assert effect != UNKNOWN, "override `effect`: say what the defense does to an update"
        assert {noise.on for noise in effect.noise} <= {"step"}, "what is noised is a step"
        parameters = {"weight": torch.zeros(2, 15_000)}
        images, labels = torch.randn(3, 1, 100, 150, generator=stream(0)), torch.tensor([0, 1, 0])
        still = defense.gradient(lambda at, *_: at["weight"].sum() * 0, _still, 3)
        noise = still(parameters, images, labels, stream())["weight"].double()
        declared = math.sqrt(sum(noise.variance for noise in effect.noise))
        assert float(noise.std()) == pytest.approx(declared, rel=0.02)

    def test_a_direction_that_changes_says_so(self) -> None:
        """Without noise and factors per example, it is the direction that was handed in."""
        defense = self.make()
        effect = defense.effect(defense.training(example_training()))
        if effect.noise or effect.scaled_examples or not effect.exact:
            return
        parameters, images, labels = _example()
        direction = defense.gradient(_cross_entropy, _plain, 3)
        step = direction(parameters, images, labels, stream())
        expected = _plain(parameters, images, labels, stream())
        ratios = torch.cat([(step[n] / expected[n]).flatten() for n in expected])
        one = ratios.mean() if effect.scaled else torch.ones_like(ratios[0])
        torch.testing.assert_close(ratios, one.expand_as(ratios), rtol=1e-4, atol=0)

    def test_a_claimed_mechanism_adds_its_noise(self) -> None:
        """Measures the noise at a zero gradient, over the largest effect of a single example.

        The same stream adds the same noise to both batches, so their difference is the example's.
        """
        defense = self.make()
        mechanism = defense.guarantee(Guarantee(), defense.training(example_training())).mechanism
        if not isinstance(mechanism, Mechanism) or mechanism.unit != "example":
            return
        parameters = {"weight": torch.zeros(2, 15_000)}
        images = torch.randn(3, 1, 100, 150, generator=stream(0))
        labels = torch.tensor([0, 1, 0])
        still = defense.gradient(lambda at, *_: at["weight"].sum() * 0, _plain, 3)
        noise = float(still(parameters, images, labels, stream())["weight"].double().std())
        first = defense.gradient(_steep, _plain, 3)(parameters, images, labels, stream())["weight"]
        example = images[:1] * (0 if mechanism.relation == "zero_out" else -1)
        exchanged = torch.cat([example, images[1:]])
        second = defense.gradient(_steep, _plain, 3)(parameters, exchanged, labels, stream())[
            "weight"
        ]
        reach = float((first.double() - second.double()).norm())
        sensitivity = reach / (2 if mechanism.relation == "replace_one" else 1)
        assert noise / sensitivity > 0.98 * mechanism.noise_multiplier


def _example() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    draw = stream(0)
    parameters = {
        "weight": torch.randn(5, 4, generator=draw),
        "bias": torch.randn(5, generator=draw),
    }
    return parameters, torch.randn(3, 1, 2, 2, generator=draw), torch.tensor([0, 3, 3])


def _cross_entropy(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    logits = images.flatten(1) @ parameters["weight"].T + parameters["bias"]
    return torch.nn.functional.cross_entropy(logits, labels)


def _steep(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    scores = (images.flatten(1) * parameters["weight"][labels]).sum(1)
    return 1e6 * scores.mean()


def _still(parameters: Tensors, *_: object) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in parameters.items()}


def _plain(
    parameters: Tensors, images: Tensor, labels: Tensor, _: torch.Generator
) -> dict[str, Tensor]:
    at = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    grads = torch.autograd.grad(_cross_entropy(at, images, labels), list(at.values()))
    return dict(zip(at, grads, strict=True))
