"""The one place that reads entry points: what is installed, and how a name becomes an object.

A plugin is a class that derives from `Plugin`: a frozen pydantic model whose fields are its
hyper-parameters. It is registered under one of the groups below, by the name users write in a
scenario. A plugin that fails to import stops only the scenario that names it.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from fedsim.types import FedsimError

GROUPS = ("fedsim.attacks", "fedsim.defenses", "fedsim.models", "fedsim.data")


class PluginError(FedsimError):
    """A plugin does not exist or cannot be loaded."""


class Plugin(BaseModel, ABC):
    """Base of everything that a scenario names: frozen, unknown parameters refused, finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str] = ""
    """The source: authors, title, venue and year, equation. Shown by `fedsim list`."""


@dataclass(frozen=True)
class Installed:
    """A plugin as `fedsim list` shows it. `error` says why it cannot be loaded, if it cannot."""

    group: str
    name: str
    package: str
    version: str
    cls: type[Plugin] | None
    error: str | None

    @property
    def summary(self) -> str:
        """The first line of the class's docstring."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0] if self.cls else ""


@cache
def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names(group: str) -> tuple[str, ...]:
    """Names registered in `group`, sorted; loads nothing."""
    return tuple(sorted(_entry_points(group)))


def load(group: str, name: str) -> type[Plugin]:
    """The class registered as `name` in `group`.

    Raises:
        PluginError: no such name (with the nearest one), or importing it failed (with the cause).
    """
    kind = group.removeprefix("fedsim.")
    point = _entry_points(group).get(name)
    if point is None:
        close = difflib.get_close_matches(name, names(group), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise PluginError(
            f"no plugin named {name!r} in {kind}{hint} (installed: {', '.join(names(group))})"
        )
    try:
        cls = point.load()
    except Exception as error:  # a third party's import may raise anything
        raise PluginError(
            f"plugin {name!r} of {_package(point)} cannot be imported: "
            f"{type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise PluginError(
            f"plugin {name!r} of {_package(point)} is {cls!r}; expected a class derived from "
            "fedsim.plugins.Plugin"
        )
    return cls


def installed(group: str) -> list[Installed]:
    """Every plugin of `group`, also those that cannot be loaded."""
    rows = []
    for name in names(group):
        point = _entry_points(group)[name]
        version = point.dist.version if point.dist else "?"
        try:
            rows.append(Installed(group, name, _package(point), version, load(group, name), None))
        except PluginError as error:
            rows.append(Installed(group, name, _package(point), version, None, str(error)))
    return rows


def parameters(cls: type[Plugin]) -> dict[str, dict[str, Any]]:
    """JSON-schema properties of a plugin's parameters, by name."""
    properties: dict[str, dict[str, Any]] = cls.model_json_schema().get("properties", {})
    return properties


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module
