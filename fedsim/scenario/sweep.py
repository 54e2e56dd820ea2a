"""Opens scenario files: `--set a.b=c` of the command line, and one file that stands for several."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.contracts.grant import Grant
from fedsim.scenario.document import (
    Document,
    KeyPath,
    Mark,
    ScenarioError,
    ScenarioProblem,
    parse,
    show_path,
)
from fedsim.scenario.explain import show
from fedsim.scenario.model import Scenario
from fedsim.scenario.reader import parse_yaml, read
from fedsim.scenario.resolve import (
    as_document,
    plugin_slots,
    resolve,
    resolve_plugin,
    resolve_section,
)
from fedsim.types import FedsimError
from fedsim.words import nearest, number_of

# All before the first `=` that is not within a quoted key.
_KEY = re.compile(r'((?:[^"=]|"[^"]*")*+)=')
_EXAMPLES = {"--set": "training.rounds=10", "--grant": "labels=known"}


@dataclass(frozen=True)
class _Override:
    path: KeyPath
    value: Document

    @property
    def origin(self) -> Mark:
        return self.value.mark(())


def _parse_override(text: str, option: str) -> _Override:
    """Reads an override such as `attacks[0].iterations=50`; errors name `option`."""
    origin = f"{option} {text if len(text) <= 80 else text[:77] + '...'}"
    match = _KEY.match(text)
    try:
        if not match:
            raise ValueError(f"expected key=value, such as {_EXAMPLES[option]}")
        path = parse(match[1].strip())
    except ValueError as error:
        raise ScenarioError([ScenarioProblem(str(error), (), origin)]) from error
    # An empty value is null, as after a key in YAML.
    value = text[match.end() :]
    document = parse_yaml(value, origin, lines=False) if value.strip() else Document(None)
    return _Override(path, Document(document.value, {**document.marks, (): Mark(origin)}))


def _apply_all(document: Document, overrides: Sequence[_Override]) -> Document:
    """Returns a copy with all overrides in place, later ones winning, or refuses all wrong ones."""
    problems: list[ScenarioProblem] = []
    for override in overrides:
        try:
            document = _apply(document, override)
        except LookupError as error:
            problems.append(override.origin.problem(override.path, str(error.args[0])))
    if problems:
        raise ScenarioError(problems)
    return document


def parameters_of(
    group: str, name: str, settings: Sequence[str] = (), *, origin: str = ""
) -> dict[str, Any]:
    """Returns all parameters of the plugin `name`: its defaults, changed by `settings`.

    Args:
        group: The plugin's group, such as `fedsim.attacks`.
        name: The plugin's name.
        settings: Parameters as `name=value`, as on the command line.
        origin: Source of the name, such as `--attack idlg`, with which errors begin; may be empty.

    Raises:
        ScenarioError: the plugin is not installed, or a setting is wrong.
    """
    written = _apply_all(Document({"name": name}), _parse_overrides(settings))
    try:
        return resolve_plugin(group, written).parameters
    except ScenarioError as error:
        raise ScenarioError(
            # The name was written by `origin`, not by a setting: the message has no key path to
            # show.
            ScenarioProblem(problem.message, (), origin)
            if problem.path == ("name",) and not problem.origin
            else problem
            for problem in error.problems
        ) from error


def grant_of(words: Sequence[str]) -> Grant:
    """Returns the grant that words such as `labels=known` make; a ScenarioError refuses others.

    Fields that no word names have the values of `Grant()`.
    """
    grants = _parse_overrides(words, "--grant")
    overrides = [replace(grant, path=("knowledge", *grant.path)) for grant in grants]
    section: Grant = resolve_section("knowledge", _apply_all(Document({}), overrides))
    return section


def _parse_overrides(texts: Sequence[str], option: str = "--set") -> list[_Override]:
    """Reads overrides; a ScenarioError lists all that are wrong."""
    parsed: list[_Override] = []
    problems: list[ScenarioProblem] = []
    for text in texts:
        try:
            parsed.append(_parse_override(text, option))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(problems)
    return parsed


def _apply(document: Document, override: _Override) -> Document:
    path, new = override.path, override.value
    # Only text at these places is a plugin's bare name, which parameters may be added to.
    shorthand = {slot.path: slot.value for slot in plugin_slots(document.value)}
    created: list[KeyPath] = []

    def rebuilt(value: Any, depth: int) -> Any:
        if depth == len(path):
            return new.value
        part, here = path[depth], show_path(path[:depth])
        if isinstance(value, str) and shorthand.get(path[:depth]) is value:
            value = {"name": value}
        if isinstance(part, int):
            if not isinstance(value, list):
                raise LookupError(f"{here} is {show(value)}, not a list; drop [..]")
            if part >= len(value):
                raise LookupError(
                    f"{here} has {number_of(len(value), 'item')}, counted from 0; "
                    + (f"use an index up to {len(value) - 1}" if value else "set the list itself")
                )
            return [*value[:part], rebuilt(value[part], depth + 1), *value[part + 1 :]]
        if value is None:
            value = {}
        if isinstance(value, list):
            number = part if isinstance(part, str) and part.isdecimal() else "0"
            # `attacks.0.lr` lacks brackets, `attacks.lr` an index: the remedy shows what was
            # probably meant.
            rest = path[depth + 1 :] if number == part else path[depth:]
            raise LookupError(
                f"{here} is a list; name an item by its index, such as "
                f"{show_path((*path[:depth], int(number[:9]), *rest))}"
            )
        if not isinstance(value, Mapping):
            raise LookupError(
                f"{here} is {show(value)}, which holds no keys; give {here} itself a value"
            )
        if part not in value:
            created.append(path[: depth + 1])
        return {**value, part: rebuilt(value.get(part), depth + 1)}

    value = rebuilt(document.value, 0)
    # What stood at the path is gone, so its marks go too.
    marks = {at: mark for at, mark in document.marks.items() if at[: len(path)] != path}
    marks |= dict.fromkeys(created, override.origin)
    marks |= {(*path, *at): mark for at, mark in new.marks.items()}
    return Document(value, marks)


_MAX_VARIANTS = 1000
_LABEL_LENGTH = 100
_SINGLE = ("description", "seed", "attack_seed", "device")
"""Sections that hold no keys."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=,-]+")


class Variant(NamedTuple):
    """Pairs one scenario of a sweep with its values of the swept keys."""

    assignment: dict[str, Any]
    """Swept key path, as users write it -> the value it has here; empty if nothing is swept."""
    scenario: Scenario

    @property
    def label(self) -> str:
        """Name of the variant, fit for a folder: `training.rounds=4`; empty if nothing is swept.

        A digest of the assignment keeps it unique where a value is a list or mapping, has other
        characters than letters, digits and `_.+=,-`, or makes more than 100 characters.
        """
        exact = ",".join(f"{key}={_brief(value)}" for key, value in self.assignment.items())
        label = _UNSAFE.sub("-", exact)
        # A brief mapping or list drops structure, so two different ones may read the same.
        whole = all(not isinstance(value, (dict, list)) for value in self.assignment.values())
        if label == exact and whole and len(label) <= _LABEL_LENGTH:
            return label
        digest = hashlib.sha256(json.dumps(self.assignment, sort_keys=True).encode()).hexdigest()
        return f"{label[:_LABEL_LENGTH]}-{digest[:8]}"


@dataclass(frozen=True)
class _Axis:
    key: str
    path: KeyPath
    values: tuple[Document, ...]


def open_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Opens the scenario file at `path` with `overrides` (`key=value`), without validating it.

    A later override wins. An override of a swept key, or of a key above it, ends its sweep. A
    ScenarioError says that the file cannot be read, or that an override is wrong or would be lost.
    """
    parsed = _parse_overrides(overrides)
    document = read(path)
    if not isinstance(document.value, Mapping):
        return document  # which `expand` refuses
    return _pin_overrides(_apply_all(document, parsed), parsed)


def expand(document: Document | Mapping[str, Any] | Scenario) -> list[Variant]:
    """Returns every scenario that `document` stands for; the last list of the sweep varies fastest.

    The `sweep` maps key paths to lists of values. Without it there is a single scenario, with an
    empty assignment. A ScenarioError lists what is wrong with the sweep and all of its scenarios,
    or says that there are over 1,000.
    """
    document = as_document(document)
    axes, problems = _axes(document)
    base = document.without(("sweep",))
    variants: list[Variant] = []
    for values in product(*(axis.values for axis in axes)):
        try:
            assigned = [_Override(a.path, value) for a, value in zip(axes, values, strict=True)]
            scenario = resolve(_apply_all(base, assigned))
        except ScenarioError as error:
            # Variants share most of their text; ScenarioError drops repeated problems.
            problems += error.problems
            continue
        names = {axis.key: value.value for axis, value in zip(axes, values, strict=True)}
        variants.append(Variant(names, scenario))
    if problems:
        raise ScenarioError(problems)
    return variants


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Loads and resolves the scenario in the file at `path`, with `overrides` (`key=value`).

    A ScenarioError says that something is wrong, or that keys are swept, which takes `expand`.
    """
    document = open_document(path, overrides)
    variants = expand(document)
    if len(variants) > 1 or variants[0].assignment:
        raise ScenarioError(
            [
                document.problem(
                    ("sweep",),
                    f"stands for {number_of(len(variants), 'scenario')} where one is wanted; "
                    "remove it, or pin every swept key with --set",
                )
            ]
        )
    return variants[0].scenario


def locate(document: Document, error: FedsimError) -> ScenarioError:
    """Returns `error` as a ScenarioError that says where in `document` the fault is written.

    The place is known if the message begins with a key path, such as `data.clients: `. A
    ScenarioError is returned as it is.
    """
    if isinstance(error, ScenarioError):
        return error
    key, _, message = str(error).partition(": ")
    path: KeyPath = ()
    with suppress(ValueError):
        path = parse(key)
    if not path or path[0] not in Scenario.model_fields:
        return ScenarioError([document.problem((), str(error))])
    # A swept value is not written at its own key but in the sweep.
    written = next(
        (("sweep", swept) for swept, at in _list_swept(document) if path[: len(at)] == at), path
    )
    return ScenarioError([document.mark(written).problem(path, message)])


def _axes(document: Document) -> tuple[list[_Axis], list[ScenarioProblem]]:
    """Returns the swept keys with their values, and what is wrong with them."""
    value = document.value
    sweep = value.get("sweep") if isinstance(value, Mapping) else None
    if sweep is None:
        return [], []
    if not isinstance(sweep, Mapping):
        problem = f"expected a mapping such as {{training.rounds: [1, 10]}}, got {show(sweep)}"
        return [], [document.problem(("sweep",), problem)]
    axes: list[_Axis] = []
    problems: list[ScenarioProblem] = []
    for key, values in sweep.items():
        fault = _fault(key, values, axes)
        if fault:
            problems.append(document.problem(("sweep", key), fault))
            continue
        items = tuple(document.part(("sweep", key, index)) for index in range(len(values)))
        axis = _Axis(key, parse(key), items)
        axes.append(axis)
    count = math.prod(len(axis.values) for axis in axes)
    if count > _MAX_VARIANTS:
        problem = (
            f"stands for {number_of(count, 'scenario')}, and at most {_MAX_VARIANTS:,} are "
            "allowed; sweep less"
        )
        # Without axes `expand` still checks the scenario itself, once.
        return [], [*problems, document.problem(("sweep",), problem)]
    return axes, problems


def _fault(key: str, values: Any, before: Sequence[_Axis]) -> str | None:
    """Returns what is wrong with sweeping `key` over `values`; None if nothing is."""
    try:
        path = parse(key)
    except ValueError as error:
        return str(error)
    if path[0] == "name" or path[0] not in Scenario.model_fields:
        fields = [field for field in Scenario.model_fields if field != "name"]
        hint = nearest(str(path[0]), fields) if path[0] != "name" else ""
        return f"cannot be swept{hint or '; sweep something below ' + ', '.join(fields)}"
    if path[0] in _SINGLE and len(path) > 1:
        return f"{path[0]} is one value and holds no keys; sweep {path[0]} itself"
    if not isinstance(values, list) or not values:
        return f"expected a list of values to try, got {show(values)}"
    # Python takes 1, 1.0 and true for equal; their JSON differs.
    texts = [json.dumps(value, sort_keys=True) for value in values]
    if len(set(texts)) < len(texts):
        return "a value is listed twice; remove one"
    for axis in before:
        # One path begins with the other: whichever is set later would undo the first.
        shared = min(len(axis.path), len(path))
        if axis.path[:shared] == path[:shared]:
            return f"overlaps {axis.key}, which is swept too; sweep the outer one only"
    return None


def _list_swept(document: Document) -> Iterator[tuple[str, KeyPath]]:
    sweep = document.value.get("sweep") if isinstance(document.value, Mapping) else None
    for key in sweep if isinstance(sweep, Mapping) else ():
        try:
            yield key, parse(key)
        except ValueError:
            continue  # `expand` refuses it


def _pin_overrides(document: Document, overrides: Sequence[_Override]) -> Document:
    """Returns the document without the swept keys that an override sets."""
    problems: list[ScenarioProblem] = []
    for key, path in list(_list_swept(document)):
        for override in overrides:
            # Set at the swept key or above it, an override replaces what the sweep would set.
            if path[: len(override.path)] == override.path:
                document = document.without(("sweep", key))
                break
            # Set below it, the sweep would overwrite the override in every variant.
            if override.path[: len(path)] == path:
                instead = show_path(("sweep", key))
                problem = f"{key} is swept, so this would be lost; set {instead} instead"
                problems.append(override.origin.problem(override.path, problem))
    if problems:
        raise ScenarioError(problems)
    return document


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        rest = [f"{key}={_brief(item)}" for key, item in value.items() if key != "name"]
        return "+".join([str(value["name"])] * ("name" in value) + rest)
    if isinstance(value, list):
        return "+".join(_brief(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
