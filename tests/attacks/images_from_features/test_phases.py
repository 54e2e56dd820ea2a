"""What comes when: deep bodies peeled and relaxed, or relaxed alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deep_victims import observe

from fedsim import rng
from fedsim.attacking.knowledge import Public, hand_over
from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing.cases import example_batch
from fedsim.types import Observation
from fedsim_attacks.images_from_features._body_gradient import (
    BodyGradient,
    PartGradient,
    WholeGradient,
)
from fedsim_attacks.images_from_features._stage_descents import Relaxation, StagePeeling
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion


def kinds(observation: Observation, attack: FactoredInversion) -> list[type]:
    state = attack.init(observation, Knowledge(), rng.generator(0, "phases"))
    found = []
    while not attack.terminate(state):
        state = attack.step(state)
        found.append(type(state.phase.misfit))
    assert state.phase.contrast is not None
    return found


@pytest.mark.parametrize("std", [1e-4, 1e-1])
def test_noise_that_buries_the_update_leaves_nothing_to_peel(std: float) -> None:
    observation, _ = observe([{"name": "gaussian_noise", "std": std}])
    found = kinds(observation, FactoredInversion(iterations=10))
    assert (StagePeeling in found) == (std < 1e-3)


@pytest.mark.parametrize(("std", "expected"), [(0.01, BodyGradient), (0.3, WholeGradient)])
def test_noise_that_drowns_a_shallow_body_leaves_the_whole_update(
    std: float, expected: type
) -> None:
    observation, _ = observe([{"name": "gaussian_noise", "std": std}], model="convnet")
    state = FactoredInversion().init(observation, Knowledge(), rng.generator(0, "phases"))
    assert type(state.phase.misfit) is expected
    assert state.phase.iterations == 1500


def test_several_local_steps_of_a_deep_body_are_relaxed_and_not_unrolled() -> None:
    observation, _ = observe([], steps=2)
    assert kinds(observation, FactoredInversion(iterations=10)) == [Relaxation] * 10


@pytest.mark.parametrize(
    ("defense", "iterations", "least"),
    [([], 400, 13.0), ([{"name": "gaussian_noise", "std": 0.01}], 200, 12.0)],
)
def test_a_deep_body_is_peeled_first_and_relaxed_last_and_its_images_come_out(
    defense: list[dict[str, Any]],
    iterations: int,
    least: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two photographs behind a ResNet-18."""
    observation, truth = observe(defense)
    phases, step = [], FactoredInversion.step

    def watched(self: FactoredInversion, state: Any) -> Any:
        state = step(self, state)
        phases.append(type(state.phase.misfit))
        return state

    monkeypatch.setattr(FactoredInversion, "step", watched)
    result = solve(FactoredInversion(iterations=iterations), observation, Knowledge(), 0)
    if not defense:
        assert phases == [StagePeeling] * 140 + [PartGradient] * 160 + [Relaxation] * 100
    images = result.reconstruction.images
    assert images is not None
    error = (images[:, None] - truth.images[None]).square().flatten(2).mean(2).min(1).values
    assert float(-10 * error.log10().mean()) > least


def public(observation: Observation) -> Knowledge:
    images, _ = example_batch(30, observation.model.input_shape)
    return hand_over(
        observation, None, Grant.least(public="test"), Public(images=(images * 255).byte())
    )[1]


@pytest.mark.parametrize("std", [1e-2, 0.3])
def test_public_images_tell_of_features_where_these_are_known(std: float) -> None:
    observation, _ = observe([{"name": "gaussian_noise", "std": std}], model="convnet")
    state = FactoredInversion().init(observation, public(observation), rng.generator(0, "phases"))
    assert state.phases.distribution is not None
    apart = not torch.equal(*state.phases.distribution.means)
    assert apart == (state.phase.features is not None) == (std < 0.1)
    assert torch.equal(state.images, state.phases.distribution.means)


def test_the_more_noise_the_more_the_law_of_public_images_counts() -> None:
    def weight(std: float) -> float:
        observation, _ = observe([{"name": "gaussian_noise", "std": std}] if std else [])
        attack = FactoredInversion(iterations=1)
        return attack.init(
            observation, public(observation), rng.generator(0, "phases")
        ).phases.distribution_weight

    found = [weight(std) for std in (0.0, 1e-3, 1e-2, 1e-1)]
    assert found[0] == 1e-3
    assert sorted(found) == found
    assert found[-1] > found[0]
