"""Reads entry points, as no other module does: what is installed, and how a name becomes a class.

A plugin that fails to import stops only the scenario that names it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from fedsim.types import FedsimError, Named
from fedsim.words import nearest

_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

GROUPS = (
    "fedsim.attacks",
    "fedsim.defenses",
    "fedsim.learners",
    "fedsim.models",
    "fedsim.data",
    "fedsim.engines",
    "fedsim.mechanisms",
    "fedsim.targets",
)


class PluginError(FedsimError):
    """Raised if a plugin does not exist or cannot be loaded; the message names the remedy."""


class Plugin(BaseModel, ABC):
    """Base of everything that a scenario names: a frozen pydantic model of the plugin's parameters.

    An unknown, infinite or NaN parameter is a ValidationError. The docstring below a field
    describes the parameter wherever it is listed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paper: ClassVar[str] = ""
    """Source: authors, title, venue and year, equation. `fedsim list` shows it."""


Role = TypeVar("Role", bound=Plugin)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Describes a plugin's parameter as `fedsim list` shows it."""

    name: str
    type: str
    """Type in the words of JSON Schema, such as `number or null`."""
    default: Any
    """Default value, as in JSON; None for a required parameter, too."""
    required: bool
    range: str
    """Allowed values, such as `> 0, <= 1`; empty if the type says it all."""
    description: str


@dataclass(frozen=True)
class Installed:
    """Describes a plugin, registered as `name` in `group`, as `fedsim list` shows it.

    `error` is None or says why it cannot be loaded; `cls` is then None, and `parameters` are empty.
    `package` is the distribution or, if not known, the module; `version` is then `?`.
    """

    group: str
    name: str
    package: str
    version: str
    cls: type[Plugin] | None
    parameters: tuple[Parameter, ...]
    error: str | None

    @property
    def summary(self) -> str:
        """First line of the class's docstring, maybe inherited; empty if it cannot be loaded."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0] if self.cls else ""


@cache
def _entry_points() -> Mapping[str, Mapping[str, tuple[EntryPoint, ...]]]:
    """Returns group -> name -> entry points of that name, more than one where packages clash."""
    # All groups at once, since each query reads the metadata of every installed package.
    installed = entry_points()
    groups = {}
    for group in GROUPS:
        found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
        for point in installed.select(group=group):
            # An editable installation may be found twice; that is one plugin, not a conflict.
            found.setdefault(point.name, {})[_package(point), point.value] = point
        groups[group] = {name: tuple(points.values()) for name, points in found.items()}
    return groups


def _points(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    if group not in GROUPS:
        raise PluginError(f"no group {group!r} of plugins{nearest(group, GROUPS)}")
    return _entry_points()[group]


def names(group: str) -> tuple[str, ...]:
    """Returns the names of plugins of `group`, sorted; a PluginError if it is none of `GROUPS`."""
    return tuple(sorted(_points(group)))


def load(group: str, name: str) -> type[Plugin]:
    """Loads the class registered as `name` in `group`, such as `fedsim.attacks`.

    A PluginError says that there is no such group or name, that two packages claim it, or that it
    cannot be imported or is no concrete subclass of `Plugin`.
    """
    kind = group.removeprefix("fedsim.")
    points = _points(group).get(name, ())
    if not points:
        known = names(group)
        raise PluginError(
            f"no plugin named {name!r} in {kind}{nearest(name, known)} "
            f"(installed: {', '.join(known)})"
        )
    if len(points) > 1:
        packages = " and ".join(f"{_package(point)} ({point.value})" for point in points)
        raise PluginError(
            f"plugin {name!r} in {kind} is registered twice, by {packages}; uninstall one"
        )
    (point,) = points
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:  # a third party's import may raise anything
        raise PluginError(
            f"plugin {name!r} of {_package(point)} cannot be imported: "
            f"{type(error).__name__}: {error}; repair or uninstall that package"
        ) from error
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise PluginError(
            f"plugin {name!r} of {_package(point)} is {cls!r}; expected a class derived from "
            "fedsim.contracts.plugins.Plugin"
        )
    # Python would refuse it only when a scenario makes one, by a TypeError that names no package.
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PluginError(
            f"plugin {name!r} of {_package(point)} is abstract; its author has to implement "
            f"{missing}"
        )
    return cls


def reference(group: str, plugin: Plugin) -> Named:
    """Returns `plugin`'s name in `group`, and its parameters in the types of JSON.

    A PluginError says that it has no name there, or that there is no such group.
    """
    kind = type(plugin)
    value = f"{kind.__module__}:{kind.__qualname__}"
    for name, points in _points(group).items():
        if any(point.value == value for point in points):
            return Named(name=name, parameters=plugin.model_dump(mode="json"))
    raise PluginError(
        f"{value} is registered under no name in {group.removeprefix('fedsim.')}, so that nobody "
        "else can build it; add its entry point and install its package"
    )


def load_as(group: str, name: str, roles: tuple[type[Role], ...]) -> type[Role]:
    """Loads a class as `load` does; a PluginError as well if it derives from none of `roles`."""
    cls = load(group, name)
    if not issubclass(cls, roles):
        wanted = " or ".join(role.__name__ for role in roles)
        raise PluginError(
            f"plugin {name!r} in {group.removeprefix('fedsim.')} is {cls.__module__}."
            f"{cls.__qualname__}, which does not derive from {wanted}; register it in the group "
            "of its kind"
        )
    return cls


def list_installed(group: str) -> list[Installed]:
    """Returns the plugins of `group` by name, also broken ones; a PluginError if no such group."""
    rows = []
    # Where two packages claim the name, `load` says so; the first stands for the row.
    for name, (point, *_) in sorted(_points(group).items()):
        package, version = _package(point), point.dist.version if point.dist else "?"
        try:
            cls = load(group, name)
            row = Installed(group, name, package, version, cls, parameters(cls), None)
        except PluginError as error:
            row = Installed(group, name, package, version, None, (), str(error))
        rows.append(row)
    return rows


def schema(cls: type[BaseModel], ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """Returns the JSON Schema of a plugin's parameters; a PluginError if a type has none.

    `ref_template` is the form of references to nested models, as of pydantic's `model_json_schema`.
    """
    try:
        return cls.model_json_schema(ref_template=ref_template, schema_generator=Described)
    except Exception as error:  # pydantic has no common base for what may go wrong here
        raise PluginError(
            f"the parameters of {cls.__module__}.{cls.__qualname__} cannot be written in a "
            f"scenario: {error}; its author has to give them types that JSON has"
        ) from error


def parameters(cls: type[BaseModel]) -> tuple[Parameter, ...]:
    """Returns a plugin's parameters in the order of its class; a PluginError as of `schema`."""
    whole = schema(cls)
    definitions = whole.get("$defs", {})
    required = whole.get("required", [])
    return tuple(
        Parameter(
            name=name,
            type=_type(item, definitions),
            default=item.get("default"),
            required=name in required,
            range=_range(item, definitions),
            description=" ".join(item.get("description", "").split()),
        )
        for name, item in whole.get("properties", {}).items()
    )


def _type(item: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    item = _follow_reference(item, definitions)
    if "anyOf" in item:
        return " or ".join(dict.fromkeys(_type(one, definitions) for one in item["anyOf"]))
    if "type" in item:
        kind = str(item["type"])
        if kind == "array" and "items" in item:
            return f"array of {_type(item['items'], definitions)}"
        if kind == "object" and "properties" in item:
            keys = ", ".join(item["properties"])
            return f"object {{{keys}}}"
        return kind
    return "any"


def _range(item: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    item = _follow_reference(item, definitions)
    if "anyOf" in item:
        return " or ".join(filter(None, (_range(one, definitions) for one in item["anyOf"])))
    if "enum" in item or "const" in item:
        return ", ".join(str(value) for value in item.get("enum", [item.get("const")]))
    return ", ".join(f"{sign} {item[key]:g}" for key, sign in _BOUNDS.items() if key in item)


def _follow_reference(item: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    # Without a reference the name is empty, and the item stands for itself.
    name = str(item.get("$ref", "")).rpartition("/")[2]
    resolved: Mapping[str, Any] = definitions.get(name, item)
    return resolved


def _package(point: EntryPoint) -> str:
    return _name(point.dist) if point.dist else point.module


@cache
def _name(package: Distribution) -> str:
    return package.name


class Described(GenerateJsonSchema):
    """Generates JSON Schemas in which the docstring below a field of a class describes it."""

    # Pydantic's `use_attribute_docstrings` does so as each class is made: a second a process.

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        """Returns the JSON Schema of one model, given pydantic's core `schema` of it."""
        made = super().model_schema(schema)
        texts = descriptions(schema["cls"])
        for name, item in made.get("properties", {}).items():
            if name in texts:
                # A description that the field itself declares stays.
                item.setdefault("description", texts[name])
        return made


def descriptions(cls: type) -> Mapping[str, str]:
    """Returns field -> docstring below it, of a pydantic class and its bases.

    Fields without one are missing, and all of a class whose source file is not there.
    """
    # From the bases on, so that a subclass's own text wins.
    return {name: text for each in reversed(cls.__mro__) for name, text in _texts_of(each).items()}


@cache
def _texts_of(cls: type) -> Mapping[str, str]:
    if not issubclass(cls, BaseModel) or cls is BaseModel:
        return {}
    try:
        lines, _ = inspect.findsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):  # nobody wrote it into a file
        return {}
    body = _classes("".join(lines)).get(cls.__qualname__, [])
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@cache
def _classes(source: str) -> Mapping[str, list[ast.stmt]]:
    """Returns the statements of each class in a file, by the class's qualified name."""
    found: dict[str, list[ast.stmt]] = {}

    def look(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            # Spelled as `__qualname__` is, by which a class is looked up.
            name = f"{place}{getattr(child, 'name', '')}"
            if isinstance(child, ast.ClassDef):
                found[name] = child.body
                look(child, f"{name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{name}.<locals>.")

    look(ast.parse(source), "")
    return found
