"""EVALUATION rules 1 and 2: an attack's own loss alone decides what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.contracts.attack import Attack, AttackFailed, AttackState, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import Observation, Reconstruction
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients


@dataclass(kw_only=True)
class Scripted(AttackState):
    images: Tensor
    restart: int


def scripted(
    losses: tuple[float, ...],
    images: Tensor,
    changed: Callable[[int, Reconstruction], Reconstruction] = lambda _, found: found,
) -> Attack[Any]:
    """An attack whose restart i ends at losses[i] and returns images[i], `changed`."""
    restarts = iter(range(len(losses)))

    class Toy(Attack[Scripted]):
        def init(
            self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
        ) -> Scripted:
            restart = next(restarts)
            return Scripted(loss=torch.zeros(()), images=images[restart], restart=restart)

        def step(self, state: Scripted) -> Scripted:
            state.iteration += 1
            return state

        def terminate(self, state: Scripted) -> bool:
            return state.iteration == 2

        def postprocess(self, state: Scripted) -> Reconstruction:
            found = Reconstruction(
                images=state.images, loss=losses[state.restart], iterations=state.iteration
            )
            return changed(state.restart, found)

    return Toy()


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((3.0, 1.0, 2.0), 1),
        ((math.nan, 3.0, 1.0, 2.0), 2),
        ((2.0, math.nan, 1.0), 2),
        ((math.nan, -math.inf, math.inf, 5.0), 3),
        ((1.0, math.nan, math.nan), 0),
    ],
)
def test_the_least_finite_own_loss_wins_under_its_own_index(
    losses: tuple[float, ...], best: int
) -> None:
    observation, truth = make_observation(*example_batch(1))
    images = torch.rand(len(losses), 1, 1, 16, 16, generator=rng.generator(0, "images"))
    likest = (best + 1) % len(losses)
    images[likest] = truth.images  # the likest to the victim, and not chosen for it
    solution = solve(scripted(losses, images), observation, Knowledge(), 0, restarts=len(losses))
    assert solution.restart == best
    assert solution.reconstruction.images is not None
    assert torch.equal(solution.reconstruction.images, images[best])
    assert solution.reconstruction.loss == losses[best]
    assert len(solution.losses) == len(losses)
    for found, given in zip(solution.losses, losses, strict=True):
        assert found == given or (math.isnan(found) and math.isnan(given))
    assert solution.iterations == 2 * len(losses)


def test_without_a_finite_loss_there_is_no_result() -> None:
    observation, _ = make_observation(*example_batch(1))
    with pytest.raises(AttackFailed, match="finite loss"):
        attack = scripted((math.nan, math.inf), torch.zeros(2, 1, 1, 16, 16))
        solve(attack, observation, Knowledge(), 0, restarts=2)


@pytest.mark.parametrize("part", ["images", "features", "rows", "membership"])
def test_an_answer_that_is_not_finite_loses_whatever_its_loss(part: str) -> None:
    observation, _ = make_observation(*example_batch(1))
    images = torch.zeros(2, 1, 1, 16, 16)

    def attack(wrong: float) -> Attack[Any]:
        """Answers with one value that is `wrong` at the least loss, in one part alone."""

        def changed(restart: int, found: Reconstruction) -> Reconstruction:
            values = torch.tensor([[0.5, 0.5 if restart else wrong]])
            answered: dict[str, Any] = {"images": None} | {part: values}
            return replace(found, **answered)

        return scripted((1.0, 2.0), images, changed)

    solution = solve(attack(math.nan), observation, Knowledge(), 0, restarts=2)
    assert solution.restart == 1
    assert math.isnan(solution.losses[0]) and solution.losses[1] == 2.0
    with pytest.raises(AttackFailed, match="finite loss and answer"):
        solve(attack(math.nan), observation, Knowledge(), 0)
    infinite = solve(attack(math.inf), observation, Knowledge(), 0, restarts=2)
    assert infinite.restart == (0 if part == "membership" else 1)


def test_restarts_start_from_points_of_their_own() -> None:
    observation, _ = make_observation(*example_batch(1))
    attack = InvertingGradients(iterations=2)
    three = solve(attack, observation, Knowledge(), 4, restarts=3)
    assert len(set(three.losses)) == 3
    assert three.losses[0] == solve(attack, observation, Knowledge(), 4).losses[0]
    assert three.reconstruction.loss == min(three.losses)


def test_the_reported_iterate_is_that_of_least_own_loss() -> None:
    observation, truth = make_observation(*example_batch(1))
    attack = InvertingGradients(iterations=1000, step_size=0.5)
    known = Knowledge(grant=Grant(labels="known"), true_labels=truth.labels)
    state = attack.init(observation, known, rng.generator(1, "attack", 0))
    losses: list[float] = []
    iterates = []
    while len(losses) < 40 or losses[-1] == min(losses):  # end on an iterate that is not the best
        iterates.append(state.matching.pixels(state.candidate.images))
        state = attack.step(state)
        losses.append(float(state.loss))
    best = losses.index(min(losses))
    errors = [float((images - truth.images).square().mean()) for images in iterates]
    found = attack.postprocess(state)
    assert best != len(losses) - 1, "the last iterate has to be a wrong answer here"
    assert best != errors.index(min(errors)), "the likest iterate has to be a wrong answer here"
    assert found.loss == losses[best]
    assert found.images is not None
    assert torch.equal(found.images, iterates[best])
