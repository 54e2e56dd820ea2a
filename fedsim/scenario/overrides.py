"""Changes a document before it is validated: `--set a.b=c` on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from fedsim.scenario.reader import parse_yaml
from fedsim.scenario.resolve import plugin_slots, resolve_plugin, resolve_section
from fedsim.words import number_of

_EXAMPLES = {"--set": "training.rounds=10", "--grant": "labels=known"}
"""Options that take `key=value`, each with an example."""


@dataclass(frozen=True)
class Override:
    """Puts a value at a key path, and says where it comes from."""

    path: KeyPath
    value: Document

    @property
    def origin(self) -> Mark:
        """Place that errors about the value point to."""
        return self.value.mark(())


def parse_override(text: str, option: str = "--set") -> Override:
    """Reads an override such as `attacks[0].iterations=50`, whose value is YAML.

    An empty value is null. Errors name the `option` of the command line that `text` is from:
    `--set` or `--grant`.

    Raises:
        ScenarioError: `text` has no `=`, its key is no key path, or its value is no YAML.
    """
    origin = f"{option} {text if len(text) <= 80 else text[:77] + '...'}"
    key, equals, value = _split(text)
    try:
        if not equals:
            raise ValueError(f"expected key=value, such as {_EXAMPLES[option]}")
        path = parse(key.strip())
    except ValueError as error:
        raise ScenarioError([ScenarioProblem(str(error), (), origin)]) from error
    # An empty value is null, as after a key in YAML.
    document = parse_yaml(value, origin, lines=False) if value.strip() else Document(None)
    return Override(path, Document(document.value, {**document.marks, (): Mark(origin)}))


def apply(document: Document, overrides: Sequence[Override]) -> Document:
    """Returns the document with every override in place, later ones winning.

    `document` itself stays as it is.

    A mapping on the way that does not exist is created; a plugin written as just its name becomes a
    mapping that parameters can be added to.

    Raises:
        ScenarioError: a key path leads through something that is no mapping or list, or beyond the
            end of a list. All such overrides are listed.
    """
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
        origin: Source of the name, such as `--attack idlg`, with which errors begin.

    Raises:
        ScenarioError: the plugin is not installed, or a setting is wrong.
    """
    written = apply(Document({"name": name}), parse_overrides(settings))
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
    """Returns the grant that words such as `labels=known` make; the rest stays at its default.

    Raises:
        ScenarioError: a word names nothing that can be granted, or a value that it cannot have.
    """
    grants = parse_overrides(words, "--grant")
    overrides = [replace(grant, path=("knowledge", *grant.path)) for grant in grants]
    section: Grant = resolve_section("knowledge", apply(Document({}), overrides))
    return section


def parse_overrides(texts: Sequence[str], option: str = "--set") -> list[Override]:
    """Reads several overrides, each as `parse_override` does.

    Errors name the `option` of the command line, `--set` or `--grant`.

    Raises:
        ScenarioError: some are wrong; all of them are listed.
    """
    parsed: list[Override] = []
    problems: list[ScenarioProblem] = []
    for text in texts:
        try:
            parsed.append(parse_override(text, option))
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(problems)
    return parsed


def _split(text: str) -> tuple[str, str, str]:
    """Splits at the first `=` that is not within a quoted key."""
    quoted = False
    for position, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif character == "=" and not quoted:
            return text[:position], "=", text[position + 1 :]
    return text, "", ""


def _apply(document: Document, override: Override) -> Document:
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
