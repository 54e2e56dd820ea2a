"""What comes when: deep bodies peeled and relaxed, or relaxed alone."""

from __future__ import annotations

from typing import Any

import pytest
from deep_victims import observe

from fedsim import rng
from fedsim.adversary import solve
from fedsim.types import Knowledge, Observation
from fedsim_attacks.body_gradient import BodyGradient, PartGradient
from fedsim_attacks.factored_inversion import FactoredInversion
from fedsim_attacks.peeling import Peeling
from fedsim_attacks.relaxation import Relaxation
from fedsim_attacks.whole_gradient import WholeGradient


def kinds(observation: Observation, attack: FactoredInversion) -> list[type]:
    state = attack.init(observation, Knowledge(), rng.generator(0, "phases"))
    found = []
    while not attack.terminate(state):
        state = attack.step(state)
        found.append(type(state.phase.misfit))
    assert state.phase.contrast is not None
    return found


def test_a_deep_body_is_peeled_first_and_relaxed_last() -> None:
    observation, _ = observe([])
    found = kinds(observation, FactoredInversion(iterations=300))
    assert found == [Peeling] * 105 + [PartGradient] * 120 + [Relaxation] * 75


def test_what_peeling_loses_is_left_to_all_stages_together() -> None:
    """Of three steps nothing is explained."""
    observation, _ = observe([])
    found = kinds(observation, FactoredInversion(iterations=10))
    assert found == [Peeling] * 3 + [Relaxation] * 7


@pytest.mark.parametrize("std", [1e-4, 1e-1])
def test_noise_that_buries_the_update_leaves_nothing_to_peel(std: float) -> None:
    observation, _ = observe([{"name": "gaussian_noise", "std": std}])
    found = kinds(observation, FactoredInversion(iterations=10))
    assert (Peeling in found) == (std < 1e-3)


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


def test_one_iteration_is_too_few_to_peel() -> None:
    observation, _ = observe([])
    assert kinds(observation, FactoredInversion(iterations=1)) == [Relaxation]


@pytest.mark.parametrize(
    ("defense", "least"), [([], 15.0), ([{"name": "gaussian_noise", "std": 0.01}], 12.0)]
)
def test_images_of_a_deep_body_come_out(defense: list[dict[str, Any]], least: float) -> None:
    """Two photographs behind a ResNet-18."""
    observation, truth = observe(defense)
    result = solve(FactoredInversion(iterations=400), observation, Knowledge(), 0)
    images = result.reconstruction.images
    assert images is not None
    error = (images[:, None] - truth.images[None]).square().flatten(2).mean(2).min(1).values
    assert float(-10 * error.log10().mean()) > least
