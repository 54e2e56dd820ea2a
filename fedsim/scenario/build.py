"""From a resolved scenario to the objects it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fedsim import plugins
from fedsim.attack import Attack, AttackState
from fedsim.data.base import DataSource
from fedsim.defense import (
    AggregationDefense,
    Stack,
    TrainingDefense,
    UpdateDefense,
    chain,
)
from fedsim.models.base import ModelPlugin
from fedsim.plugins import Plugin
from fedsim.scenario.model import AttackEntry, PluginRef, Scenario, Training
from fedsim.types import Algorithm, LocalTraining

P = TypeVar("P", bound=Plugin)

ROLES: dict[str, tuple[type[Plugin], ...]] = {
    "fedsim.attacks": (Attack,),
    "fedsim.defenses": (UpdateDefense, TrainingDefense, AggregationDefense),
    "fedsim.models": (ModelPlugin,),
    "fedsim.data": (DataSource,),
}
"""What a plugin of a group must derive from."""

RESERVED: dict[str, tuple[str, ...]] = {
    "fedsim.attacks": ("name", "label", "restarts"),
    "fedsim.defenses": ("name",),
    "fedsim.models": ("name",),
    "fedsim.data": ("name",),
}
"""Keys of a scenario's entry that are not the plugin's, so no parameter can be called so."""


def plugin_class(group: str, name: str) -> type[Plugin]:
    """The class registered as `name` in `group`, fit to be named by a scenario.

    Raises:
        PluginError: it is not installed, cannot be imported, does not derive from the group's base
            class, or has a parameter whose name is reserved.
    """
    cls = plugins.load(group, name)
    roles = ROLES[group]
    if not issubclass(cls, roles):
        wanted = " or ".join(role.__name__ for role in roles)
        raise plugins.PluginError(
            f"plugin {name!r} in {group.removeprefix('fedsim.')} is {cls.__module__}."
            f"{cls.__qualname__}, which does not derive from {wanted}; register it in the group "
            "of its kind"
        )
    for field in RESERVED[group]:
        if field in cls.model_fields:
            raise plugins.PluginError(
                f"plugin {name!r} in {group.removeprefix('fedsim.')} has a parameter called "
                f"{field!r}, which a scenario uses itself; its author has to rename it"
            )
    return cls


def build_stack(refs: Sequence[PluginRef]) -> Stack:
    """The defenses of `refs`, composed in written order.

    Raises:
        PluginError: a defense is not installed or cannot be imported.
        FedsimError: the defenses cannot be composed.
    """
    return chain(*(_instance("fedsim.defenses", ref) for ref in refs))  # type: ignore[arg-type]


def build_attack(entry: AttackEntry) -> Attack[AttackState]:
    """The attack of `entry`.

    Raises:
        PluginError: it is not installed or cannot be imported.
    """
    attack = _instance("fedsim.attacks", PluginRef(name=entry.name, parameters=entry.parameters))
    assert isinstance(attack, Attack)  # noqa: S101 - plugin_class has checked it
    return attack


def build_source(ref: PluginRef) -> DataSource:
    """The data source of `ref`.

    Raises:
        PluginError: it is not installed or cannot be imported.
    """
    source = _instance("fedsim.data", ref)
    assert isinstance(source, DataSource)  # noqa: S101 - plugin_class has checked it
    return source


def algorithm(training: Training) -> Algorithm:
    """The algorithm that `training` asks for, or implies if it names none."""
    if training.algorithm:
        return training.algorithm
    local = training.local
    return "fedsgd" if local.steps == 1 and local.momentum == 0 else "fedavg"


def declared_training(scenario: Scenario) -> LocalTraining:
    """The clients' local training before any defense changes it."""
    return declared(scenario.training)


def declared(training: Training) -> LocalTraining:
    """The local training of `training`, before any defense changes it."""
    local = training.local
    return LocalTraining(
        algorithm=algorithm(training),
        steps=local.steps,
        batch_size=local.batch_size,
        lr=local.lr,
        momentum=local.momentum,
        mode=local.mode,
        batches=local.batches,
    )


def observed_rounds(scenario: Scenario) -> tuple[int, ...]:
    """The rounds whose updates are recorded, ascending, from 1."""
    total = scenario.training.rounds
    return tuple(sorted({total if r == "last" else r for r in scenario.observe.rounds}))


def observed_clients(scenario: Scenario) -> tuple[int, ...]:
    """The clients whose updates are recorded, ascending, from 0."""
    chosen = scenario.observe.clients
    return tuple(range(scenario.data.clients)) if chosen == "all" else tuple(sorted(set(chosen)))


def _instance(group: str, ref: PluginRef) -> Plugin:
    return plugin_class(group, ref.name).model_validate(ref.parameters)
