"""Builds the objects that a resolved scenario names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack
from fedsim.contracts.defense import (
    AggregationDefense,
    DataDefense,
    Defense,
    ModelDefense,
    StatisticDefense,
    TrainingDefense,
    UpdateDefense,
)
from fedsim.contracts.guarantee import Release
from fedsim.contracts.learner import DataSource, Engine, Learner, Problem
from fedsim.contracts.plugins import Plugin
from fedsim.contracts.stack import Stack, chain
from fedsim.models.base import ModelPlugin
from fedsim.scenario.model import LocalSection, PluginRef, Scenario, Training
from fedsim.types import Algorithm, Dataset, LocalTraining, Named, StepRule, Table

ROLES: dict[str, tuple[type[Plugin], ...]] = {
    "fedsim.attacks": (Attack,),
    "fedsim.defenses": (
        UpdateDefense,
        TrainingDefense,
        ModelDefense,
        AggregationDefense,
        DataDefense,
        StatisticDefense,
    ),
    "fedsim.learners": (Learner,),
    "fedsim.models": (ModelPlugin,),
    "fedsim.data": (DataSource,),
    "fedsim.engines": (Engine,),
}
"""Base classes of the plugins of each group, of which a plugin must derive from one."""

RESERVED: dict[str, tuple[str, ...]] = {
    "fedsim.attacks": ("name", "label", "restarts", "blind"),
    "fedsim.defenses": ("name",),
    "fedsim.learners": ("name",),
    "fedsim.models": ("name",),
    "fedsim.data": ("name",),
    "fedsim.engines": (),
}
"""Keys of a scenario's entry that are not the plugin's; no parameter may have such a name."""


def plugin_class(group: str, name: str) -> type[Plugin]:
    """Returns the class of plugin `name` in `group`, a key of `ROLES` such as `fedsim.attacks`.

    A PluginError says that it cannot be loaded, derives from no class of `ROLES[group]`, or has a
    parameter with a name of `RESERVED[group]`.
    """
    cls = plugins.load_as(group, name, ROLES[group])
    for field in RESERVED[group]:
        if field in cls.model_fields:
            raise plugins.PluginError(
                f"plugin {name!r} in {group.removeprefix('fedsim.')} has a parameter called "
                f"{field!r}, which a scenario uses itself; its author has to rename it"
            )
    return cls


def build_stack(refs: Sequence[PluginRef]) -> Stack:
    """Builds the defenses of `refs` and composes them in that order.

    A FedsimError says that a defense cannot be loaded, or cannot stand where it does (see `chain`);
    pydantic's ValidationError that a parameter is wrong.
    """
    members: list[Defense] = []
    for ref in refs:
        member = plugin_class("fedsim.defenses", ref.name).model_validate(ref.parameters)
        assert isinstance(member, Defense)
        members.append(member)
    return chain(*members)


def announce_defenses(
    stack: Stack, refs: Sequence[PluginRef], declared: LocalTraining, release: Release | None
) -> tuple[Mapping[str, object], ...]:
    """Returns the `name` and parameters of each of a stack's defenses, as observations show them.

    Parameters that the stack computes, such as `std` from an ε, replace or complete the written
    ones. It fails as `Stack.guarantees`.

    Args:
        stack: Stack that was built of `refs`.
        refs: Defenses as the scenario names them, whose order the answer has.
        declared: Local training before any defense changes it.
        release: Release of a closed-form learner; None for learners that train.
    """
    # Both iterators follow the written order of their kind, so that each `next` belongs to its
    # `ref`.
    proven, trained = stack.guarantees(declared, release), iter(stack.training_defenses)
    acting = iter(zip(stack.update_defenses, proven, strict=False))
    members = []
    for ref in refs:
        known: Mapping[str, object] = {}
        kind = plugin_class("fedsim.defenses", ref.name)
        if issubclass(kind, UpdateDefense):
            applied, before = next(acting)
            known = applied.public_parameters(before)
        elif issubclass(kind, TrainingDefense) and (defense := next(trained)).target:
            known = defense.model_dump(mode="json")  # with the noise that was found
        members.append({"name": ref.name, **ref.parameters, **known})
    return tuple(members)


def build_learner(ref: PluginRef) -> Learner:
    """Builds the learner that `ref` names; PluginError or ValidationError if it cannot be made."""
    learner = plugin_class("fedsim.learners", ref.name).model_validate(ref.parameters)
    assert isinstance(learner, Learner)
    return learner


def build_engine(name: str) -> Engine:
    """Builds the engine `name`; a PluginError says that it cannot be loaded, or has parameters."""
    cls = plugin_class("fedsim.engines", name)
    if cls.model_fields:
        raise plugins.PluginError(
            f"engine {name!r} has parameters ({', '.join(cls.model_fields)}), and a scenario sets "
            "none of an engine; its author has to read them elsewhere"
        )
    engine = cls()
    assert isinstance(engine, Engine)
    return engine


def problem_of(
    scenario: Scenario,
    stack: Stack,
    described: Dataset | Table,
    examples: int,
    device: torch.device,
) -> Problem:
    """Returns what the scenario's learner is started with (`Learner.start`), for one of its stacks.

    Args:
        scenario: A resolved scenario.
        stack: Stack of the scenario's defenses that is trained.
        described: Data with the test split; training examples may be left out.
        examples: Number of all clients' training examples together.
        device: Device that the learner computes on.
    """
    return Problem(
        learner=_name_plugin(scenario.learner),
        stack=stack,
        dataset=described,
        device=device,
        seed=scenario.seed,
        clients=scenario.data.clients,
        examples=examples,
        model=None if scenario.model is None else _name_plugin(scenario.model),
        weights=scenario.training.weights,
        plants=scenario.observe.plant,
        projection_radius=scenario.training.projection_radius,
    )


def _name_plugin(ref: PluginRef) -> Named:
    return Named(name=ref.name, parameters=ref.parameters)


def algorithm(training: Training) -> Algorithm:
    """Returns `training.algorithm` or, where that is None, the one that the local steps imply.

    `fedsgd` is implied by one step of SGD without momentum or weight decay, `fedavg` by all else.
    """
    if training.algorithm:
        return training.algorithm
    local = training.local
    # One plain step moves weights by the gradient alone, so the gradient itself is sent.
    plain = local.momentum == 0 and _rule_of(local) is None
    return "fedsgd" if local.steps == 1 and plain else "fedavg"


def _rule_of(local: LocalSection) -> StepRule | None:
    """Returns what a local step is besides SGD; None for SGD without decay."""
    rule = StepRule(optimizer=local.optimizer, weight_decay=local.weight_decay)
    return rule if rule != StepRule() else None


def declared_training(training: Training) -> LocalTraining:
    """Returns the local training before any defense; `lr` lacks the factor of `rate_factor`."""
    local = training.local
    return LocalTraining(
        algorithm=algorithm(training),
        steps=local.steps,
        batch_size=local.batch_size,
        lr=local.lr,
        momentum=local.momentum,
        mode=local.mode,
        batches=local.batches,
        sampling=local.sampling,
        rule=_rule_of(local),
    )


def rate_factor(training: Training, round: int) -> float:
    """Returns the factor, in (0, 1], of `training.local.lr` in `round`, which counts from 1."""
    schedule = training.local.schedule
    if schedule is None:
        return 1.0
    if schedule.name == "step":
        assert schedule.every is not None
        return float(schedule.factor ** ((round - 1) // schedule.every))
    # 0 in the first round, and 1 in the last, which then has lr times `factor`.
    done = (round - 1) / max(1, training.rounds - 1)
    # Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, without restarts.
    return schedule.factor + (1 - schedule.factor) * (0.5 + 0.5 * math.cos(math.pi * done))
