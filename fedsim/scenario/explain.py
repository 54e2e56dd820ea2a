"""Explains pydantic's errors in the words of a scenario."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedsim.scenario.document import KeyPath
from fedsim.scenario.model import SLUG_PATTERN
from fedsim.types import DEVICE_PATTERN
from fedsim.words import nearest, number_of

_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
    "multiple_of": ("multiple_of", "a multiple of"),
}
_LENGTHS = {
    "too_short": ("min_length", "at least"),
    "too_long": ("max_length", "at most"),
    "string_too_short": ("min_length", "at least"),
    "string_too_long": ("max_length", "at most"),
}
_PATTERNS = {
    SLUG_PATTERN: "a name of letters, digits and _ . + - that could be a folder's, such as dp-1.0",
    DEVICE_PATTERN: "auto, cpu, cuda or cuda:N",
}


@dataclass(frozen=True)
class _Finding:
    path: KeyPath
    expected: str | None
    """Middle of the message "expected ..., got ..."; None if `message` is the whole text."""
    message: str
    choices: tuple[str, ...] = ()


def explain(
    error: ValidationError, value: Any, keys_at: Callable[[KeyPath], Iterable[str]]
) -> list[tuple[KeyPath, str]]:
    """Returns (key path, message) of each place in `value` where pydantic's `error` finds fault.

    Each key path occurs once, in the order of the errors. `value` is what was validated.
    `keys_at(path)` returns the keys allowed in the mapping at `path`.
    """
    findings = [_finding(detail, value, keys_at) for detail in error.errors(include_url=False)]
    # Of a union's alternatives, the one that matched further in says what is wrong.
    outer = {finding.path[:end] for finding in findings for end in range(len(finding.path))}
    by_path: dict[KeyPath, list[_Finding]] = {}
    for finding in findings:
        if finding.expected is None or finding.path not in outer:
            by_path.setdefault(finding.path, []).append(finding)
    return [(path, _message(group, _look_up(value, path))) for path, group in by_path.items()]


def _look_up(value: Any, path: KeyPath) -> Any:
    """Returns what stands at `path` in nested mappings and lists; None where nothing, or null."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def unknown_key(key: str, choices: Iterable[str]) -> str:
    """Returns the message on an unknown `key`: with a similar one of `choices`, else with all."""
    choices = list(choices)
    hint = nearest(key, choices)
    if hint:
        return f"unknown key{hint}"
    listed = f"known keys: {', '.join(choices)}" if choices else "there are none to set here"
    return f"unknown key; remove it ({listed})"


def show(value: Any) -> str:
    """Returns `value` as messages show it: text in quotes, truth values as `true` and `false`.

    A mapping or list is named without its content. What takes more than 60 characters, quotes
    included, is cut to 40, and its length told.
    """
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    # YAML writes `true` where Python writes `True`.
    text = json.dumps(value) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _finding(
    detail: ErrorDetails, value: Any, keys_at: Callable[[KeyPath], Iterable[str]]
) -> _Finding:
    kind, context = detail["type"], detail.get("ctx", {})
    path = _written_path(detail["loc"], value, kind)
    if kind == "extra_forbidden":
        return _Finding(path, None, unknown_key(str(path[-1]), keys_at(path[:-1])))
    if kind == "missing":
        return _Finding(path, None, f"missing; add `{path[-1]}: ...`")
    if kind in ("value_error", "assertion_error"):
        return _Finding(path, None, str(context.get("error", detail["msg"])))
    expected, choices = _describe_expected(kind, context)
    if expected is None:
        return _Finding(path, None, f"{detail['msg']} (got {show(_look_up(value, path))})")
    # pydantic ends a location with [key] if the key itself is wrong, not its value.
    if detail["loc"][-1:] == ("[key]",):
        return _Finding(path, None, f"expected {expected}, got {show(path[-1])}")
    return _Finding(path, expected, "", choices)


def _describe_expected(kind: str, context: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """Returns what pydantic wanted to see, and the words to choose from if there are any."""
    if kind in _TYPES:
        return _TYPES[kind], ()
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        return f"{words} {f'{bound:g}' if isinstance(bound, float) else bound}", ()
    if kind in _LENGTHS:
        name, words = _LENGTHS[kind]
        unit = "character" if kind.startswith("string") else "item"
        return f"{words} {number_of(context[name], unit)}", ()
    if kind in ("literal_error", "enum"):
        # pydantic gives the words only within a text: 'a', 'b' or 'c'.
        choices = tuple(re.findall(r"'([^']*)'", str(context["expected"])))
        return str(context["expected"]), choices
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return _PATTERNS.get(pattern, f"text that matches {pattern}"), ()
    return None, ()


def _written_path(location: tuple[int | str, ...], value: Any, kind: str) -> KeyPath:
    """Returns pydantic's location without the names of union members, which nobody wrote."""
    path: list[int | str] = []
    for position, part in enumerate(location):
        here = _look_up(value, tuple(path))
        if isinstance(here, Mapping):
            # A missing key is not in the mapping, yet it is what the message has to name.
            written = part in here or (kind == "missing" and position == len(location) - 1)
        else:
            written = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if written:
            path.append(part)
    return tuple(path)


def _message(alternatives: list[_Finding], value: Any) -> str:
    messages = [finding.message for finding in alternatives if finding.expected is None]
    if messages:
        return "; ".join(dict.fromkeys(messages))
    expected = " or ".join(dict.fromkeys(finding.expected or "" for finding in alternatives))
    choices = [choice for finding in alternatives for choice in finding.choices]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"expected {expected}, got {show(value)}{hint or _hint(expected, value)}"


def _hint(expected: str, value: Any) -> str:
    if "number" in expected and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes" if value.strip() == value else ""
    if expected == "a whole number" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if expected.startswith("a list") and not isinstance(value, (list, Mapping, type(None))):
        return f"; write [{value}]"
    if expected == "text" and isinstance(value, (int, float)):
        return "; put it in quotes"
    return ""


def known_keys(model: type[BaseModel]) -> Callable[[KeyPath], tuple[str, ...]]:
    """Returns a function from key paths within `model` to the keys allowed there, perhaps none."""

    def keys_at(path: KeyPath) -> tuple[str, ...]:
        annotations: list[Any] = [model]
        for part in path:
            annotations = [
                inner for annotation in annotations for inner in _descend(annotation, part)
            ]
        fields = [name for annotation in annotations for name in _fields(annotation)]
        return tuple(dict.fromkeys(fields))

    return keys_at


def _descend(annotation: Any, part: str | int) -> list[Any]:
    """Returns the annotations of what stands at `part` of such a value, unions taken apart."""
    if part in _fields(annotation):
        return _members(annotation.model_fields[part].annotation)
    if _fields(annotation):
        return []
    # The last argument types the items of list[T] and the values of dict[K, V].
    arguments = get_args(annotation)
    return _members(arguments[-1]) if arguments else []


def _members(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    return [annotation]


def _fields(annotation: Any) -> tuple[str, ...]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return tuple(annotation.model_fields)
    return ()
