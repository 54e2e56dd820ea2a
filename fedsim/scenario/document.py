"""Holds a scenario as written: plain values, and where each of them stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsim.scenario.location import KeyPath, Problem, ScenarioError, parse


@dataclass(frozen=True)
class Mark:
    """Says where a value is written: the file or the override, and the line counted from 1."""

    origin: str
    line: int | None = None


@dataclass(frozen=True)
class Document:
    """Holds the values of a scenario file, not yet validated."""

    value: Any
    """Mappings with text keys, lists, text, numbers, booleans, None."""
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)
    """Empty for a scenario that was not read from a file."""

    def mark(self, path: KeyPath) -> Mark:
        """Returns where `path` is written; where it is absent, where its nearest parent is."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return Mark("")

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Returns a problem with the value at `path`, with its place."""
        mark = self.mark(path)
        return Problem(message, path, mark.origin, mark.line)

    def error(self, path: str, message: str) -> ScenarioError:
        """Returns the error to raise about the value at `path`, such as `data.clients`."""
        return ScenarioError([self.problem(parse(path), message)])

    def part(self, path: KeyPath) -> Document:
        """Returns what stands at `path`, which has to exist, as a document of its own."""
        value = self.value
        for key in path:
            value = value[key]
        start = len(path)
        marks = {at[start:]: mark for at, mark in self.marks.items() if at[:start] == path}
        return Document(value, marks)

    def without(self, path: KeyPath) -> Document:
        """Returns the document without what stands at `path`, a path of keys."""
        marks = {at: mark for at, mark in self.marks.items() if at[: len(path)] != path}
        return Document(_pruned(self.value, path), marks)


def _pruned(value: Any, path: KeyPath) -> Any:
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    kept = {key: item for key, item in value.items() if key != path[0] or path[1:]}
    return kept | {path[0]: _pruned(value[path[0]], path[1:])} if path[1:] else kept
