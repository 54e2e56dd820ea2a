"""Rule 24: attacks allow for what a defense does, whoever wrote it and whatever its name is."""

from __future__ import annotations

import ast
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack
from fedsim.contracts.defense import UpdateDefense, add_gaussian
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import chain
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import UNKNOWN, Effect, LocalTraining, Noise, Observation, Tensors
from fedsim_attacks.gradient_matching._matching import removal_bounds
from fedsim_attacks.head_features._head_gradient import HeadGradient

ROOT = Path(fedsim.__file__).parent
STACKS: dict[str, list[dict[str, Any]]] = {
    "noise": [{"name": "gaussian_noise", "std": 1e-3}],
    "clipped-noise": [{"name": "clip", "norm": 0.1}, {"name": "gaussian_noise", "std": 1e-4}],
    "pruned": [{"name": "gradient_pruning", "ratio": 0.7}],
    "pruned-tensors": [{"name": "gradient_pruning", "ratio": 0.7, "scope": "tensor"}],
    "sent": [{"name": "top_k", "ratio": 0.3}],
    "rounded": [{"name": "quantization", "bits": 6}],
    "dp-sgd": [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 0.01}],
}


def source_of_attacks() -> list[Path]:
    import fedsim_attacks

    return sorted(Path(fedsim_attacks.__file__).parent.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_no_attack_reads_the_names_of_defenses() -> None:
    """`Observation.defense` is for people; nor does theory of what leaks read it."""
    files = [*source_of_attacks(), ROOT / "attacking" / "running.py"]
    assert len(files) > 50
    found = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == "defense"
    ]
    assert not found


def test_no_attack_knows_a_defense_by_name() -> None:
    names = set(plugins.names("fedsim.defenses")) - {"least_squares", "dropout", "aggregate"}
    assert len(names) > 10
    found = [
        f"{path.name}:{node.lineno}: {node.value}"
        for path in source_of_attacks()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found


def observed(defense: list[dict[str, Any]], images: int = 2) -> Observation:
    parameters = {"hidden": [12], "head": {"width": 400}}
    seen, _ = make_observation(
        *example_batch(images, (1, 8, 8)), model="mlp", model_parameters=parameters, defense=defense
    )
    return seen


def recovered(attack: str, seen: Observation, **parameters: Any) -> Tensor:
    made = plugins.load("fedsim.attacks", attack)(**parameters)
    assert isinstance(made, Attack)
    state = made.init(seen, Knowledge(), torch.Generator().manual_seed(1))
    while not made.terminate(state):
        state = made.step(state)
    found = made.postprocess(state).features
    assert found is not None
    return found


@pytest.mark.parametrize("stack", STACKS)
def test_a_foreign_defense_of_the_same_effect_gives_the_same_bytes(stack: str) -> None:
    own = observed(STACKS[stack])
    named = tuple({**member, "name": f"my_{member['name']}"} for member in own.defense)
    foreign = replace(own, defense=named)
    short = {"iterations": 100}
    assert torch.equal(
        recovered("best_features", own, **short), recovered("best_features", foreign, **short)
    )


class MyNoise(UpdateDefense):
    """Of a third party: noise on the update."""

    std: float = 1e-3

    def init(self, update: Tensors, sensitivity: float) -> Tensors:
        return {}

    def apply(
        self, update: Tensors, state: Tensors, rng: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        return add_gaussian(update, self.std, rng), state

    def guarantee(self, before: Guarantee) -> Guarantee:
        return before.unproven("of a third party")

    def effect(self, before: Guarantee) -> Effect:
        return Effect(noise=(Noise(variance=self.std**2, on="update"),))


class MySilence(MyNoise):
    """The same, undeclared."""

    def effect(self, before: Guarantee) -> Effect:
        return UNKNOWN


DECLARED = LocalTraining(algorithm="fedsgd", steps=1, batch_size=2, lr=0.1)


def test_a_third_partys_noise_is_known_as_our_own() -> None:
    own = observed([{"name": "gaussian_noise", "std": 1e-3}])
    assert chain(MyNoise()).effect(DECLARED) == own.effect
    assert own.effect.noise[0].variance == pytest.approx(1e-6)


def test_a_stack_composes_effects() -> None:
    stack = observed(
        [
            {"name": "dp_sgd", "norm": 2.0, "noise_multiplier": 0.5},
            {"name": "clip", "norm": 3.0},
            {"name": "clip", "norm": 0.1},
            {"name": "gradient_pruning", "ratio": 0.5},
            {"name": "gaussian_noise", "multiplier": 0.2},
        ]
    ).effect
    assert [noise.on for noise in stack.noise] == ["step", "update"]
    assert stack.noise[0].variance == pytest.approx(0.25)
    assert stack.noise[1].variance == pytest.approx(0.02**2)
    assert (stack.bound, stack.removed) == (0.1, "smallest")
    assert stack.scaled and stack.scaled_examples and not stack.rounded and stack.known
    assert not chain(MySilence(), MyNoise()).effect(DECLARED).known
    pruned = Effect(removed="smallest")
    assert pruned.then(pruned).removed == "smallest"
    assert pruned.then(Effect(removed="smallest_of_tensor")).removed == "others"
    assert Effect().then(pruned) == pruned == pruned.then(Effect())


def test_an_undeclared_effect_is_taken_for_noise() -> None:
    seen = HeadGradient.read(replace(observed(STACKS["pruned"]), effect=UNKNOWN))
    assert seen.noisy and not seen.exact and not seen.pruned


@pytest.mark.parametrize("stack", ["noise", "pruned", "rounded"])
def test_what_is_declared_changes_what_the_head_is_taken_for(stack: str) -> None:
    own = HeadGradient.read(observed(STACKS[stack]))
    assert not own.exact
    assert (own.noisy, own.pruned) == (stack == "noise", stack == "pruned")


def bounds(removed: Any) -> Any:
    seen = replace(observed(STACKS["pruned"]), effect=Effect(removed=removed))
    return removal_bounds(seen, dict(seen.update))


def test_a_zero_tells_what_the_rule_says() -> None:
    """Below the smallest that is left, of all or of its tensor; by another rule, nothing."""
    kept = [t[t != 0].abs().min() for t in observed(STACKS["pruned"]).update.values()]
    assert bounds(None) is None
    assert set(map(float, bounds("smallest"))) == {float(min(kept))}
    assert list(map(float, bounds("smallest_of_tensor"))) == list(map(float, kept))
    assert set(map(float, bounds("others"))) == {torch.inf}
