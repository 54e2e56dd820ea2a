"""Derives the JSON Schema of scenario files, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from fedsim.contracts import plugins
from fedsim.scenario.build import RESERVED
from fedsim.scenario.model import SLUG_PATTERN, Scenario

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
