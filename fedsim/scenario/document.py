"""Holds a scenario as written: its values, their key paths, and errors that say where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fedsim.types import FedsimError
from fedsim.words import number_of

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a scenario, such as ("attacks", 0, "iterations")."""

_PLAIN = re.compile(r"[A-Za-z0-9_+-]+")
# One part: a key, with a dot before it unless first, an index, or a JSON string in brackets.
_PART = re.compile(
    r"""(?P<dot>\.?)(?P<key>[^.\[\]"'=\s]+)|\[(?P<index>[0-9]{1,9})\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]"""
)


_DEEPEST = 32
_SHOWN = 60
_MAX_PROBLEMS = 50


@dataclass(frozen=True)
class ScenarioProblem:
    """States one thing that is wrong with a scenario.

    Its `str` is `origin:line: key path: message`, without the parts that are empty.
    """

    message: str
    path: KeyPath = ()
    """Keys and list positions that lead to the value; empty if none is to blame."""
    origin: str = ""
    """The file, or the option such as `--set seed=1`, cut to 80 characters; empty if neither."""
    line: int | None = None
    """Line in the file, from 1; None if it has none."""

    def __str__(self) -> str:
        place = f"{self.origin}:{self.line}" if self.line else self.origin
        return ": ".join(part for part in (place, show_path(self.path), self.message) if part)


class ScenarioError(FedsimError):
    """Says that a scenario cannot be run, and why.

    The message has up to 50 problems, a line each, and the number of the others. Attribute
    `problems` is a tuple of all, at least one, by line and without repeats; those without a line
    come first.
    """

    def __init__(self, problems: Iterable[ScenarioProblem]) -> None:
        # A dict drops repeats; the sort is stable, so problems of one line keep their order.
        self.problems = tuple(sorted(dict.fromkeys(problems), key=lambda one: one.line or 0))
        lines = [str(problem) for problem in self.problems[:_MAX_PROBLEMS]]
        if more := len(self.problems) - len(lines):
            lines.append(f"and {number_of(more, 'more problem')}; correct these first")
        super().__init__("\n".join(lines))

    @property
    def path(self) -> str:
        """Key path of the first problem, such as `data.clients`; empty if no key is to blame."""
        return show_path(self.problems[0].path)

    @property
    def line(self) -> int | None:
        """Line of the first problem, counted from 1; None if it has none."""
        return self.problems[0].line


def show_path(path: KeyPath) -> str:
    """Writes a key path as users do; an empty one is an empty text.

    >>> show_path(("defenses", "dp", 1, "std"))
    'defenses.dp[1].std'
    >>> show_path(("defenses", "v1.0"))
    'defenses["v1.0"]'
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def parse(text: str) -> KeyPath:
    """Reads a key path as users write it; ValueError if it is none, or has more than 32 parts.

    >>> parse('defenses.dp[1].std')
    ('defenses', 'dp', 1, 'std')
    """
    path: list[str | int] = []
    position = 0
    while position < len(text) and len(path) < _DEEPEST:
        match = _PART.match(text, position)
        # A dot stands before every key but the first.
        if not match or (match["key"] and bool(match["dot"]) != bool(path)):
            break
        if match["index"]:
            path.append(int(match["index"]))
        elif match["quoted"]:
            path.append(str(json.loads(match["quoted"])))
        else:
            path.append(match["key"])
        position = match.end()
    if not path or position < len(text):
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ValueError(f"{shown!r} is no key path; expected one such as attacks[0].iterations")
    return tuple(path)


@contextmanager
def blaming(key: str) -> Iterator[None]:
    """Makes a FedsimError from a `with` block a plain one whose message begins with `key: `."""
    try:
        yield
    except FedsimError as error:
        raise FedsimError(f"{key}: {error}") from error


@dataclass(frozen=True)
class Mark:
    """Says where a value of a scenario is written."""

    origin: str
    """Path of the file, or the option such as `--set seed=1`; empty if neither is known."""
    line: int | None = None
    """Line in the file, from 1; None outside of files."""

    def problem(self, path: KeyPath, message: str) -> ScenarioProblem:
        """Returns the problem `message` with the value at key path `path`, written here."""
        return ScenarioProblem(message, path, self.origin, self.line)


@dataclass(frozen=True)
class Document:
    """Holds the values of a scenario file, not yet validated."""

    value: Any
    """Mappings with text keys, lists, text, numbers, booleans, None."""
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)
    """Key path -> where its value is written; empty if the scenario was not read from a file."""

    def mark(self, path: KeyPath) -> Mark:
        """Returns where `path` or its nearest parent is written; an empty Mark if none is."""
        # What is missing has no mark; errors then point at the section where it should be.
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return Mark("")

    def problem(self, path: KeyPath, message: str) -> ScenarioProblem:
        """Returns the problem `message` with the value at `path`, and where it is written."""
        return self.mark(path).problem(path, message)

    def part(self, path: KeyPath) -> Document:
        """Returns the value at `path` as a document; LookupError or TypeError if none is there."""
        value = self.value
        for key in path:
            value = value[key]
        start = len(path)
        marks = {at[start:]: mark for at, mark in self.marks.items() if at[:start] == path}
        return Document(value, marks)

    def without(self, path: KeyPath) -> Document:
        """Returns a copy without the value at `path`, if any; `path` is one or more text keys."""
        marks = {at: mark for at, mark in self.marks.items() if at[: len(path)] != path}
        return Document(_prune(self.value, path), marks)


def _prune(value: Any, path: KeyPath) -> Any:
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    # Mappings on the way are copied, never changed: other documents share them.
    kept = {key: item for key, item in value.items() if key != path[0] or path[1:]}
    return kept | {path[0]: _prune(value[path[0]], path[1:])} if path[1:] else kept
