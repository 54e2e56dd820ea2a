"""Noise whose variance is as declared, and which does not hide: the audit of stacks tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from audit_cases import find_bound
from tiny import tiny_scenario
from torch import Tensor

from fedsim.audit.two_worlds import _choose_look
from fedsim.contracts.stack import Stack
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import Tensors

pytestmark = pytest.mark.usefixtures("attacks_here")

Noise = dict[str, Tensor]
Lie = Callable[[list[Noise]], Noise]
"""From the noise that was drawn so far, the last drawn now, what is added now."""


def audited(stack: str, rounds: int = 2) -> Workload:
    return Workload(
        resolve(
            tiny_scenario(
                seed=5,
                data__clients=40,
                training={"rounds": rounds, "local": {"batch_size": 35, "lr": 0.2}},
                defenses={
                    "client": [
                        {"name": "clip", "norm": 0.5},
                        {"name": "gaussian_noise", "multiplier": 2.0},
                    ],
                    "example": [{"name": "dp_sgd", "norm": 0.2, "noise_multiplier": 4.0}],
                },
                audit={"canaries": 200, "confidence": 0.99},
            )
        ),
        stack,
    )


def spared_tensor(drawn: list[Noise]) -> Noise:
    smallest = min(drawn[-1], key=lambda name: drawn[-1][name].numel())
    return {n: 0 * z if n == smallest else z for n, z in drawn[-1].items()}


def spared_entry(drawn: list[Noise]) -> Noise:
    changed = {name: value.clone() for name, value in drawn[-1].items()}
    next(iter(changed.values())).view(-1)[17] = 0
    return changed


def signs(drawn: list[Noise]) -> Noise:
    return {name: value.sign() for name, value in drawn[-1].items()}


def same_again(drawn: list[Noise]) -> Noise:
    """Two rounds a trial."""
    return drawn[-1 - (len(drawn) + 1) % 2]


def taken_back(drawn: list[Noise]) -> Noise:
    sign = 1 if len(drawn) % 2 else -1
    return {name: sign * value for name, value in same_again(drawn).items()}


def same_in_all_tensors(drawn: list[Noise]) -> Noise:
    longest = max(drawn[-1].values(), key=Tensor.numel).flatten()
    return {n: longest[: z.numel()].view(z.shape) for n, z in drawn[-1].items()}


def honest(drawn: list[Noise]) -> Noise:
    return drawn[-1]


LIES: list[Lie] = [spared_tensor, spared_entry, signs, same_again, taken_back, same_in_all_tensors]


@pytest.mark.parametrize("lie", [*LIES, honest])
def test_a_clients_noise(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Stack.apply
    drawn: list[Noise] = []

    def lying(
        stack: Stack, update: Tensors, state: Tensors, stream: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        noisy, after = real(stack, update, state, stream)
        clipped, _ = real(stack, update, {name: 0 * value for name, value in state.items()}, stream)
        std = float(next(iter(state.values())))
        drawn.append({name: (noisy[name] - clipped[name]) / std for name in noisy})
        added = lie(drawn)
        return {name: clipped[name] + std * added[name] for name in noisy}, after

    monkeypatch.setattr(Stack, "apply", lying)
    shown, claimed = find_bound(audited("client"))
    assert (shown > claimed) == (lie is not honest)


@pytest.mark.slow
@pytest.mark.parametrize("lie", [spared_tensor, signs, same_again, same_in_all_tensors, honest])
def test_the_noise_of_an_examples_gradient(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Noise] = []

    def lying(update: Tensors, std: float, stream: torch.Generator) -> Tensors:
        drawn.append(
            {
                name: torch.randn(value.shape, generator=stream, dtype=torch.float64)
                for name, value in update.items()
            }
        )
        return {name: update[name] + std * value for name, value in lie(drawn).items()}

    monkeypatch.setattr("fedsim_defenses.dp_sgd.add_gaussian", lying)
    shown, claimed = find_bound(audited("example"))
    assert (shown > claimed) == (lie is not honest)


def test_what_is_chosen_on_one_half_shows_nothing_on_the_other() -> None:
    """Many looks at worlds that are alike: whichever seems best is counted on fresh trials."""
    from fedsim.audit.bounds import two_world_bounds

    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(60):
        worlds: Any = draw.normal(size=(2, 400, 40))
        scores = _choose_look(*worlds)
        found = two_world_bounds(*scores, delta=1e-5, confidence=0.95, gaussian=True)
        wrong += max(bound.epsilon for bound in found) > 0
    assert wrong <= 8
