"""Tells apart runs of one scenario that `--set` changed, so that they are not pooled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DECISIVE = (
    "data",
    "learner",
    "model",
    "training",
    "federation.participation",
    "federation.strategy",
    "federation.strategy_parameters",
    "observe.plant",
    "privacy",
)
"""Keys of a scenario that decide figures and that not all rows state. The seed is none of them,
since trials are pooled over it."""
_NEVER = ("training.evaluate_every",)


def differences(
    scenarios: Sequence[Mapping[str, Any]], stated: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns, for each resolved scenario, its values of the keys in which not all are the same.

    `stated` are the keys of each that its rows show already, such as those of a sweep. An empty
    scenario, of a run that lost its own, differs in nothing. Stacks of one name are compared where
    both scenarios have one.
    """
    # What rows state already tells the runs apart without being repeated.
    shown = {key for variant in stated for key in variant}
    settings = [dict(_decisive(scenario)) for scenario in scenarios]
    keys = {key: None for setting in settings for key in setting if not _within(key, shown)}
    # A run that lost its scenario has no values to differ in, and gets none.
    present = [setting for setting in settings if setting]
    differing = [key for key in keys if any(s.get(key) != present[0].get(key) for s in present)]
    stacks = [stacks_of(scenario) for scenario in scenarios]
    names = {name: None for own in stacks for name in own if not _within(f"defenses.{name}", shown)}
    # A stack that only one run has is no difference: its rows have a name of their own.
    defined = {name: [own[name] for own in stacks if name in own] for name in names}
    other = [name for name, own in defined.items() if any(each != own[0] for each in own)]
    return [
        {key: setting.get(key) for key in differing if setting}
        | {f"defenses.{name}": own[name] for name in other if name in own}
        for setting, own in zip(settings, stacks, strict=True)
    ]


def stacks_of(scenario: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the defense stacks of a resolved scenario, by name."""
    stacks = scenario.get("defenses")
    return stacks if isinstance(stacks, Mapping) else {}


def _decisive(scenario: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in leaves_of(scenario):
        if _within(key, _DECISIVE) and not _within(key, _NEVER):
            yield key, value


def leaves_of(mapping: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys and values of a nested mapping; a list is a value.

    Keys begin with `path`.
    """
    for key, value in mapping.items():
        # An empty mapping is a value: it would yield no key at all.
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _within(key: str, parts: Sequence[str] | set[str]) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in parts)
