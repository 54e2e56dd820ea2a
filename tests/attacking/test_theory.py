"""What theory says of one observation: noise in the units of its gradient, whatever declares it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsim.attacking.running import _observed_bound, _observed_rate
from fedsim.models.local import mean_gradient_factor
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.recovery import tensor_rate
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import UNKNOWN, Effect, LocalTraining, Noise, Observation

HEAD = {"width": 640, "planted": 512, "planted_std": 0.5, "planted_gain": 0.1}
CLIP = {"name": "clip", "norm": 1e-3}


def seen(
    *defense: Mapping[str, Any],
    clients: int = 1,
    training: LocalTraining | None = None,
    images: int = 3,
) -> Observation:
    """What is observed of clients with a planted head."""
    observation, _ = make_observation(
        *example_batch(images),
        model="mlp",
        model_parameters={"hidden": [12], "head": HEAD},
        defense=defense,
        num_clients=clients,
        training=training,
    )
    return observation


def rate(observation: Observation) -> float:
    found = _observed_rate(observation)
    assert found is not None
    return found


def noisier(observation: Observation) -> float:
    """By how much noise raises the rate, in units of what one image does."""
    plain = tensor_rate(width=512, dimension=12, images=observation.num_images, classes=10)
    return (rate(observation) / plain - 1) * observation.num_images


def test_without_noise_it_is_the_papers() -> None:
    plain = rate(seen())
    assert plain == pytest.approx(tensor_rate(width=512, dimension=12, images=3, classes=10))
    assert rate(seen(CLIP)) == pytest.approx(plain)
    without_head, _ = make_observation(*example_batch(2))
    assert _observed_rate(without_head) is None


def test_every_way_to_declare_noise_is_the_same_noise() -> None:
    """One standard deviation, as such, as a multiple of the bound, and as ε and δ."""
    multiplier = float(gaussian.noise_multiplier(100.0, 0.5))
    ways: list[dict[str, Any]] = [
        {"std": multiplier * 1e-3},
        {"multiplier": multiplier},
        {"epsilon": 100.0, "delta": 0.5},
    ]
    found = [seen(CLIP, {"name": "gaussian_noise", **way}) for way in ways]
    for observation in found:
        assert observation.defense[1]["std"] == pytest.approx(multiplier * 1e-3)
        assert noisier(observation) == pytest.approx(noisier(found[0]))
    assert noisier(found[0]) > 0


def test_the_noise_of_several_clients_averages() -> None:
    """Of four clients there are four times the images, and each is a quarter of what it was."""
    noise = {"name": "gaussian_noise", "std": 0.001}
    together = seen(noise, {"name": "aggregate"}, clients=4, images=12)
    alone = seen({"name": "gaussian_noise", "std": 0.0005}, images=12)
    assert noisier(together) == pytest.approx(noisier(alone), rel=0.02)


@pytest.mark.parametrize(
    "kind", [{"name": "dp_sgd"}, {"name": "correlated_noise", "correlation": 0.0}]
)
def test_noise_of_a_local_step_counts_in_units_of_the_gradient(kind: dict[str, Any]) -> None:
    """An update of weights is the gradient times the learning rate, and its noise as well."""
    defense = {**kind, "norm": 1.0, "noise_multiplier": 0.003}
    gradient = LocalTraining(algorithm="fedsgd", steps=1, batch_size=3, lr=0.05)
    found = noisier(seen(defense, training=gradient))
    assert found > 0.1
    weights = replace(gradient, algorithm="fedavg")
    assert noisier(seen(defense, training=weights)) == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize(("momentum", "correlation"), [(0.0, 0.7), (0.5, 0.0), (0.5, 0.7)])
def test_noise_of_several_steps_is_what_they_add_up_to(momentum: float, correlation: float) -> None:
    """Where nothing is left of the gradient, the mean square is the noise's variance."""
    training = LocalTraining(
        algorithm="fedavg", steps=4, batch_size=3, lr=1e-4, momentum=momentum, batches="same"
    )
    noise = {"name": "correlated_noise", "norm": 1e-6, "noise_multiplier": 2e6}
    observation = seen({**noise, "correlation": correlation}, training=training)
    step = abs(1 / mean_gradient_factor(training))
    variance = float((observation.update["head.hidden.weight"] / step).square().mean())
    assert variance < 1
    ones = replace(observation, update={"head.output.weight": torch.full((10, 640), step)})
    expected = math.sqrt(variance / ((1 - variance) / 3))
    assert noisier(ones) == pytest.approx(expected, rel=0.03)


def test_what_is_not_known_is_left_out() -> None:
    noise = {"name": "correlated_noise", "norm": 1.0, "noise_multiplier": 0.003, "correlation": 0.5}
    assert _observed_rate(replace(seen(noise), releases=4)) is None
    untold = replace(seen(), effect=UNKNOWN)
    assert _observed_rate(untold) is None
    of_the_sum = Effect(noise=(Noise(variance=1.0, on="sum"),))
    assert _observed_rate(replace(seen(), effect=of_the_sum)) is None


@pytest.mark.parametrize(
    ("head", "defense", "cause"),
    [
        (HEAD, [], "unit length"),
        (HEAD | {"planted": 0}, [], "not planted"),
        (HEAD | {"unit_features": True}, [], "K² B⁴"),
        (HEAD, [{"name": "gradient_pruning", "ratio": 0.9}], "Stein"),
        (HEAD, [{"name": "quantization", "bits": 8}], "rounded"),
        (None, [], "two-layer head"),
    ],
)
def test_a_bound_that_does_not_apply_names_the_condition(
    head: dict[str, Any] | None, defense: list[dict[str, Any]], cause: str
) -> None:
    parameters: dict[str, Any] = {"hidden": [12]} | ({"head": head} if head else {})
    observation, _ = make_observation(
        *example_batch(3), model="mlp", model_parameters=parameters, defense=defense
    )
    found = _observed_bound(observation)
    assert not found.is_valid
    assert cause in (found.reason or "")
    assert found.rate == _observed_rate(observation)
    assert (found.rate is None) == (cause in ("Stein", "rounded", "two-layer head"))


def test_a_bound_that_applies_has_no_reason() -> None:
    head = {"width": 4096, "planted": 4096, "unit_features": True}
    images, _ = example_batch(1)
    observation, _ = make_observation(
        images,
        torch.zeros(1, dtype=torch.int64),
        model="mlp",
        model_parameters={"hidden": [120], "head": head},
        num_classes=2,
    )
    found = _observed_bound(observation)
    assert found.is_valid and found.value is not None and found.rate is not None
    assert found.value == pytest.approx(found.rate * math.sqrt(2 * math.pi))
