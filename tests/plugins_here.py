"""Plugins of a test: found as if a package had registered them, and an attack to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import pytest
import torch

from fedsim.contracts import plugins
from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation


@contextmanager
def registered(members: Mapping[str, Mapping[str, type]]) -> Iterator[None]:
    """Register classes by group and name, as `{"attacks": {"dice": Dice}}`, within the block."""
    before = plugins._entry_points

    def with_own() -> dict[str, dict[str, tuple[EntryPoint, ...]]]:
        own: dict[str, dict[str, tuple[EntryPoint, ...]]] = {
            f"fedsim.{kind}": {
                name: (EntryPoint(name, f"{cls.__module__}:{cls.__qualname__}", f"fedsim.{kind}"),)
                for name, cls in classes.items()
            }
            for kind, classes in members.items()
        }
        return {group: {**known, **own.get(group, {})} for group, known in before().items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_entry_points", with_own)
        yield


class Idle(Attack[AttackState]):
    """An attack of one iteration, which does nothing."""

    def init(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> AttackState:
        return AttackState(loss=torch.zeros(()))

    def step(self, state: AttackState) -> AttackState:
        state.iteration += 1
        return state

    def terminate(self, state: AttackState) -> bool:
        return state.iteration > 0
