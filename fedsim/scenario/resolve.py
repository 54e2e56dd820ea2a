"""Resolves what was written to a scenario with every default; writes it as YAML, and its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fedsim.contracts import plugins
from fedsim.contracts.plugins import Plugin, PluginError
from fedsim.scenario.build import RESERVED, algorithm, build_learner, plugin_class
from fedsim.scenario.checks import check
from fedsim.scenario.document import Document, KeyPath, ScenarioError, ScenarioProblem
from fedsim.scenario.explain import explain, known_keys, show, unknown_key
from fedsim.scenario.model import SLUG_PATTERN, PluginRef, Scenario

_PLACEHOLDER = "?"
"""Stands for a plugin that could not be resolved, so that the rest is still checked."""


def resolve(written: Document | Mapping[str, Any] | Scenario) -> Scenario:
    """Returns the scenario with every default written out, those of its plugins included.

    `written` is a document (errors then name file and line), plain values in the form of the YAML
    file, or a scenario built in Python. A ScenarioError lists everything that is wrong.
    """
    return _Resolver(as_document(written)).scenario()


def resolve_plugin(group: str, written: Document) -> PluginRef:
    """Returns the plugin of `group` that `written` holds: its name, or a mapping with `name`.

    All of its parameters are filled in. A ScenarioError says what is wrong with it.
    """
    resolver = _Resolver(written)
    entry = resolver.plugin(Slot((), group, written.value), ("name",))
    if resolver.problems:
        raise ScenarioError(resolver.problems)
    return PluginRef(name=entry["name"], parameters=entry["parameters"])


def resolve_section(name: str, written: Document) -> Any:
    """Returns section `name` of the mapping `written`, validated, or its default if it is missing.

    Plugins in it have to be mappings with `name` and `parameters`. A ScenarioError says that it is
    wrong, or required and missing; a KeyError that a `Scenario` has no such section.
    """
    resolver = _Resolver(written)
    section = resolver.section(name, written.value)
    if resolver.problems:
        raise ScenarioError(resolver.problems)
    return section


def as_document(written: Document | Mapping[str, Any] | Scenario) -> Document:
    """Returns `written` as a document, not validated; a ScenarioError if JSON cannot hold it."""
    if isinstance(written, Document):
        return written
    return Document(_plain(_as_written(written) if isinstance(written, Scenario) else written))


def _as_written(scenario: Scenario) -> dict[str, Any]:
    plain = scenario.model_dump(mode="json")
    for slot in list(plugin_slots(plain)):
        entry = dict(slot.value)
        parameters = entry.pop("parameters")
        put(plain, slot.path, {**entry, **parameters})
    return plain


@dataclass(frozen=True)
class Slot:
    """Describes a place where a scenario names a plugin."""

    path: KeyPath
    group: str
    """Group of the plugin, such as `fedsim.attacks`."""
    value: Any
    """A name, or a mapping with `name` and parameters, as it is written."""


def plugin_slots(value: Any) -> Iterator[Slot]:
    """Yields the places where `value`, a scenario in plain values, names plugins, if any."""
    if not isinstance(value, Mapping):
        return
    data = value.get("data")
    if isinstance(data, Mapping) and "source" in data:
        yield Slot(("data", "source"), "fedsim.data", data["source"])
    for key in ("learner", "model"):
        if key in value:
            yield Slot((key,), f"fedsim.{key}s", value[key])
    stacks = value.get("defenses")
    for stack, members in stacks.items() if isinstance(stacks, Mapping) else ():
        for index, member in enumerate(members if isinstance(members, list) else ()):
            yield Slot(("defenses", stack, index), "fedsim.defenses", member)
    attacks = value.get("attacks")
    for index, entry in enumerate(attacks if isinstance(attacks, list) else ()):
        yield Slot(("attacks", index), "fedsim.attacks", entry)


def put(value: Any, path: KeyPath, new: Any) -> None:
    """Sets what stands at `path` in nested `value` to `new`, in place.

    A key may be new at the end of `path`; LookupError or TypeError if anything else is missing.
    """
    for part in path[:-1]:
        value = value[part]
    value[path[-1]] = new


@dataclass
class _Resolver:
    document: Document
    problems: list[ScenarioProblem] = field(default_factory=list)

    def scenario(self) -> Scenario:
        value = self.document.value
        if not isinstance(value, Mapping):
            self.report((), f"expected a mapping that starts with `name: ...`, got {show(value)}")
            raise ScenarioError(self.problems)
        # Plugins are resolved first: the sections are validated with {name, parameters} in their
        # places.
        core = _copy(value)
        for slot in plugin_slots(value):
            put(core, slot.path, self.plugin(slot, RESERVED[slot.group]))
        sections = {
            name: section
            for name in Scenario.model_fields
            if (section := self.section(name, core)) is not None
        }
        for name in core.keys() - Scenario.model_fields.keys():
            self.report((name,), unknown_key(name, Scenario.model_fields))
        # A path is unsound if there is a problem at it or below: checks skip what is reported
        # already.
        broken = {p.path[:end] for p in self.problems for end in range(len(p.path) + 1)}
        for path, message in check(sections, lambda path: path not in broken):
            self.report(path, message)
        if self.problems:
            raise ScenarioError(self.problems)
        training = sections["training"]
        # The implied algorithm is written out, so that a resolved scenario says what runs.
        if build_learner(sections["learner"]).trains:
            sections["training"] = training.model_copy(update={"algorithm": algorithm(training)})
        return Scenario(**sections)

    def section(self, name: str, core: Mapping[str, Any]) -> Any:
        """Validates the top-level value `name`; returns None if it is not valid."""
        info = Scenario.model_fields[name]
        if name not in core:
            if info.is_required():
                self.report((name,), f"missing; add `{name}: ...`")
                return None
            return info.get_default()
        try:
            # The field's info goes along, since it holds constraints that the bare type lacks.
            return _validate(_adapter(Annotated[info.annotation, info]), core[name])
        except ValidationError as error:
            keys_at = known_keys(Scenario)
            for path, message in explain(error, core[name], lambda p: keys_at((name, *p))):
                self.report((name, *path), message)
            return None

    def plugin(self, slot: Slot, reserved: tuple[str, ...]) -> dict[str, Any]:
        """Returns the entry of a plugin as in the model; `reserved` keys are not the plugin's."""
        written = {"name": slot.value} if isinstance(slot.value, str) else slot.value
        entry = {"name": _PLACEHOLDER, "parameters": {}}
        if not isinstance(written, Mapping):
            self.report(slot.path, f"expected a name or {{name: ...}}, got {show(slot.value)}")
            return entry
        entry |= {key: written[key] for key in reserved if key in written}
        name = written.get("name")
        if not isinstance(name, str):
            path = (*slot.path, "name")
            problem = f"expected text, got {show(name)}" if "name" in written else "missing"
            self.report(
                path, f"{problem}; add `name: ...` with one of those that `fedsim list` shows"
            )
            return {**entry, "name": _PLACEHOLDER}
        try:
            cls = plugin_class(slot.group, name)
        except PluginError as error:
            # A bare name has no key `name` that an error could point at.
            self.report(slot.path if slot.value is name else (*slot.path, "name"), str(error))
            return entry
        if "label" in reserved:
            entry.setdefault("label", name)
        parameters = {key: item for key, item in written.items() if key not in reserved}
        return {**entry, "parameters": self.parameters(cls, parameters, slot.path, reserved)}

    def parameters(
        self,
        cls: type[Plugin],
        written: Mapping[str, Any],
        place: KeyPath,
        reserved: tuple[str, ...],
    ) -> dict[str, Any]:
        keys_at = known_keys(cls)
        try:
            plugin: Plugin = _validate(_adapter(cls), written)
            return plugin.model_dump(mode="json")
        except ValidationError as error:
            for path, message in explain(
                error, written, lambda p: (*keys_at(p), *(() if p else reserved))
            ):
                self.report((*place, *path), message)
        except Exception as error:  # a third party's validator may raise anything
            cause = f"{type(error).__name__}: {error}"
            self.report(place, f"its plugin failed on it: {cause}; change it, or tell its author")
        return {}

    def report(self, path: KeyPath, message: str) -> None:
        self.problems.append(self.document.problem(path, message))


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _validate(adapter: TypeAdapter[Any], value: Any) -> Any:
    # As JSON, strictness means what a YAML author expects: lists may become tuples and whole
    # numbers may become floats, but neither text nor booleans become numbers.
    return adapter.validate_json(json.dumps(value), strict=True)


def _plain(value: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ScenarioError(
            [
                ScenarioProblem(
                    f"{error}; use only mappings, lists, text, numbers, booleans and None"
                )
            ]
        ) from error


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.2 would read as a number, as well as YAML 1.1's."""

    def ignore_aliases(self, data: object) -> bool:
        # Anchors would make the text depend on which equal values are one object.
        return True


# PyYAML asks the resolvers of a text's first character, hence the list below the pattern.
_Dumper.add_implicit_resolver(
    "fedsim:number",
    re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    list("-+.0123456789"),
)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML escapes line separators and the like only within double quotes.
    plain = all(character.isprintable() or character == "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump(scenario: Scenario) -> str:
    """Returns a resolved scenario as YAML that loads to an equal one; same scenario, same text."""
    return yaml.dump(
        _as_written(scenario), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )


_SWEEP = {
    "description": "Key path -> values to try: one scenario for each combination.",
    "type": "object",
    "additionalProperties": {"type": "array", "minItems": 1},
}


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of a scenario file, with all plugins that load."""
    whole = Scenario.model_json_schema(schema_generator=plugins.Described)
    definitions: dict[str, Any] = whole["$defs"]
    entry = definitions.pop("AttackEntry")["properties"]
    # Plugins' entries are described one by one below, with their own parameters.
    definitions.pop("PluginRef")
    extra = {name: entry[name] for name in ("label", "restarts", "blind")}
    properties = whole["properties"]
    definitions["Data"]["properties"]["source"] = _choice("fedsim.data", definitions)
    engine = definitions["Federation"]["properties"]["engine"]
    engine["enum"] = list(plugins.names("fedsim.engines"))
    properties["learner"] = _choice("fedsim.learners", definitions)
    properties["model"] = _choice("fedsim.models", definitions)
    properties["attacks"]["items"] = _choice("fedsim.attacks", definitions, extra)
    stack = {"type": "array", "items": _choice("fedsim.defenses", definitions)}
    properties["defenses"] |= {
        "patternProperties": {SLUG_PATTERN: stack},
        "additionalProperties": False,
    }
    properties["sweep"] = _SWEEP
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **whole,
        "title": "fedsim scenario",
        "description": "Everything that determines a run of fedsim.",
    }


def _choice(
    group: str, definitions: dict[str, Any], extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the forms that name a plugin of `group`; `extra` are keys the scenario adds."""
    bare: list[str] = []
    full: list[dict[str, Any]] = []
    for plugin in plugins.list_installed(group):
        if plugin.cls is None or set(RESERVED[group]) & plugin.cls.model_fields.keys():
            continue
        # Plugins may use models of the same name, so definitions carry the plugin's.
        prefix = f"{group}.{plugin.name}."
        schema = plugins.schema(plugin.cls, f"#/$defs/{prefix}{{model}}")
        definitions |= {prefix + key: item for key, item in schema.get("$defs", {}).items()}
        required = schema.get("required", [])
        if not required:
            bare.append(plugin.name)
        full.append(
            {
                "title": plugin.name,
                "description": plugin.summary,
                "type": "object",
                "properties": {
                    "name": {"const": plugin.name},
                    **(extra or {}),
                    **schema.get("properties", {}),
                },
                "required": ["name", *required],
                "additionalProperties": False,
            }
        )
    # A plugin without required parameters may be written as its bare name. `not: {}` fits nothing.
    alternatives = [{"enum": bare}] * bool(bare) + full
    return {"anyOf": alternatives} if alternatives else {"not": {}}
