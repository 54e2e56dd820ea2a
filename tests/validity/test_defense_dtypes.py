"""Rule 18: integer buffers, zero norms and NaN meet every defense (Flower issue #7631)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.contracts.defense import UpdateDefense
from fedsim.contracts.plugins import load, names
from fedsim.contracts.stack import chain
from fedsim.testing.cases import mixed_update, non_finite, same, stream, zeros
from fedsim.types import LocalTraining
from fedsim_defenses.clip import Clip

DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=4, lr=0.1)

PARAMETERS: dict[str, dict[str, Any]] = {
    "clip": {"norm": 0.5},
    "exclude_vars": {"exclude_vars": "no such name"},
    "gaussian_noise": {"multiplier": 1.0},
    "gradient_pruning": {"ratio": 0.5},
    "local_dp_mod": {"clipping_norm": 0.5, "sensitivity": 0.1, "epsilon": 1.0, "delta": 1e-3},
    "percentile_privacy": {},
    "quantization": {"bits": 4},
    "svt_privacy": {},
    "top_k": {"ratio": 0.5},
}


NOISY = {"gaussian_noise", "local_dp_mod", "svt_privacy"}


def update_defenses() -> list[str]:
    return [
        name
        for name in names("fedsim.defenses")
        if issubclass(load("fedsim.defenses", name), UpdateDefense)
    ]


def make(name: str) -> UpdateDefense:
    defense = load("fedsim.defenses", name).model_validate(PARAMETERS[name])
    assert isinstance(defense, UpdateDefense)
    return defense


def test_every_installed_update_defense_is_here() -> None:
    assert set(PARAMETERS) == set(update_defenses())


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - NOISY))
def test_a_zero_update_stays_zero(name: str) -> None:
    defense = make(name)
    defended, _ = defense.apply(zeros(), defense.init(zeros(), 1.0), stream())
    assert same({n: t.abs() for n, t in defended.items()}, zeros())


def stated(name: str, update: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    """The rule that each docstring states for an entry that is not finite."""
    if name == "clip":
        return all(not bool(t.any()) for t in found.values())
    if name == "top_k":
        return same(found, update)
    if name == "quantization":
        return same({"t": found["single"]}, {"t": update["single"]})
    if name in ("local_dp_mod", "percentile_privacy", "svt_privacy"):
        return bool(found["single"].isfinite().all())
    bad = ~update["single"].isfinite()  # the others: it stays where it is
    return torch.equal(~found["single"].isfinite(), bad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_non_finite_update_follows_the_stated_rule(name: str, value: float) -> None:
    defense, update = make(name), non_finite(value)
    defended, state = defense.apply(update, defense.init(update, 1.0), stream())
    assert stated(name, update, dict(defended))
    assert all(bool(t.isfinite().all()) for t in state.values())
    assert "finite" in (type(defense).__doc__ or "")


@pytest.mark.parametrize("name", PARAMETERS)
def test_after_a_clip_every_stack_is_finite(name: str) -> None:
    stack = chain(Clip(norm=1.0), make(name))
    state = stack.init(mixed_update(), DECLARED)
    for update in (non_finite(math.nan), mixed_update(), zeros(), non_finite(math.inf)):
        defended, state = stack.apply(update, state, stream())
        assert all(bool(t.isfinite().all()) for t in defended.values())
