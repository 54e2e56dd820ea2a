"""Reads YAML 1.2 (core schema) into a document, within limits.

`1e-3` is a number, `no` and `2024-01-01` are text. Keys are always text. Tags are refused, and
anchors can only be expanded so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fedsim.scenario.document import Document, KeyPath, Mark, ScenarioError, ScenarioProblem
from fedsim.system.paths import content
from fedsim.types import FedsimError
from fedsim.words import number_of

MAX_BYTES = 1_000_000
_MAX_DEPTH = 32
_MAX_NODES = 50_000
_MAX_DIGITS = 500
"""Maximum number of digits of a number. Python may refuse integers of more than 640 decimal digits,
and a hexadecimal digit is 1.2 decimal ones."""

# The first pattern that fits the whole text decides, so whole numbers stand before floats.
_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(~|null|Null|NULL)?"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda text: float("nan")),
)


def read(path: str | Path) -> Document:
    """Reads the scenario file at `path`, YAML 1.2 in UTF-8, without validating it.

    Raises:
        ScenarioError: it cannot be read, is no such YAML, has over 1,000,000 bytes, over 50,000
            values or over 32 levels.
    """
    origin = str(path)
    try:
        raw = content(Path(path), MAX_BYTES)
    except FileNotFoundError:
        _refuse(origin, None, "no such file; check the path")
    except OSError as error:
        _refuse(origin, None, f"cannot be read: {error.strerror or error}; check the path")
    except FedsimError as error:
        _refuse("", None, str(error))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        _refuse(origin, line, "not UTF-8 text; save the file with the encoding UTF-8")
    return parse_yaml(text, origin)


def parse_yaml(text: str, origin: str, *, lines: bool = True) -> Document:
    """Reads the YAML `text`, of any size; else a ScenarioError refuses what `read` refuses.

    Errors name `origin`, the source of the text, and the line unless `lines` is False.
    """
    builder = _Builder(origin, lines)
    try:
        return builder.document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        builder.refuse(
            mark.line + 1 if mark else None, f"not valid YAML: {problem}{_remedy(problem)}"
        )
    except yaml.reader.ReaderError as error:
        character = error.character
        shown = f"U+{character:04X}" if isinstance(character, int) else repr(character)
        builder.refuse(
            text.count("\n", 0, error.position) + 1,
            f"character {shown} is not allowed in YAML; remove it",
        )


@dataclass(frozen=True)
class _Node:
    line: int
    value: Any
    children: Mapping[str | int, _Node] = field(default_factory=dict)
    size: int = 1
    depth: int = 1


class _Builder:
    # Events, unlike PyYAML's nodes, stop a hostile file before it is expanded.
    def __init__(self, origin: str, lines: bool) -> None:
        self.origin = origin
        self.lines = lines
        self.nodes = 0
        self.depth = 0
        self.anchors: dict[str | None, _Node | None] = {}

    def refuse(self, line: int | None, message: str) -> NoReturn:
        _refuse(self.origin, line if self.lines else None, message)

    def document(self, events: Iterator[yaml.Event]) -> Document:
        root: _Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root:
                    self.refuse(_line(event), "a second document begins; keep one per file")
                root = self.node(next(events), events)
        if root is None:
            self.refuse(None, "empty; a scenario needs at least name, data, model and attacks")
        marks: dict[KeyPath, Mark] = {}
        self.collect(root, (), marks)
        # The document as a whole has a file, and no line of its own.
        marks[()] = Mark(self.origin)
        return Document(root.value, marks)

    def collect(self, node: _Node, path: KeyPath, marks: dict[KeyPath, Mark]) -> None:
        marks[path] = Mark(self.origin, node.line if self.lines else None)
        for key, child in node.children.items():
            self.collect(child, (*path, key), marks)

    def node(self, event: yaml.Event, events: Iterator[yaml.Event]) -> _Node:
        # The count tells how many values this one holds, which each alias to it adds again.
        before = self.nodes
        self.nodes += 1
        if isinstance(event, yaml.AliasEvent):
            node = self.alias(event)
        else:
            anchor: str | None = getattr(event, "anchor", None)
            if anchor:
                # None until the value is complete: an alias to it from inside would never end.
                self.anchors[anchor] = None
            self.depth += 1
            self.check_depth(event, self.depth)
            node = replace(self.fresh(event, events), size=self.nodes - before)
            self.depth -= 1
            if anchor:
                self.anchors[anchor] = node
        if self.nodes > _MAX_NODES:
            most = number_of(_MAX_NODES, "value")
            self.refuse(_line(event), f"more than {most}; shorten it, or use fewer aliases")
        return node

    def fresh(self, event: yaml.Event, events: Iterator[yaml.Event]) -> _Node:
        tag: str | None = getattr(event, "tag", None)
        if tag not in (None, "!"):
            self.refuse(_line(event), f"tag {tag!r} is not supported; remove it")
        if isinstance(event, yaml.ScalarEvent):
            return _Node(_line(event), self.scalar(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(_line(event), events)
        return self.mapping(_line(event), events)

    def alias(self, event: yaml.AliasEvent) -> _Node:
        target = self.anchors.get(event.anchor)
        if target is None:
            unfinished = event.anchor in self.anchors
            problem = "refers to itself" if unfinished else "has no anchor before it"
            self.refuse(_line(event), f"alias *{event.anchor} {problem}; write the value out")
        # An alias counts as all that it stands for, or nested aliases could grow without bound.
        self.nodes += target.size
        self.check_depth(event, self.depth + target.depth)
        return replace(target, line=_line(event))

    def check_depth(self, event: yaml.Event, depth: int) -> None:
        if depth > _MAX_DEPTH:
            self.refuse(_line(event), f"nested deeper than {_MAX_DEPTH} levels; flatten it")

    def sequence(self, line: int, events: Iterator[yaml.Event]) -> _Node:
        items: list[_Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self.node(event, events))
        children: dict[str | int, _Node] = dict(enumerate(items))
        return _make_parent(line, [item.value for item in items], children)

    def mapping(self, line: int, events: Iterator[yaml.Event]) -> _Node:
        entries: dict[str | int, _Node] = {}
        merged: dict[str | int, _Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            line_of_key = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                self.refuse(line_of_key, "a key has to be plain text; write it as one word")
            key = self.text(event)
            child = self.node(next(events), events)
            # In quotes, << is a key like any other.
            if key == "<<" and event.implicit[0]:
                merged = {**self.merge(child, line_of_key), **merged}
            elif key in entries:
                first = entries[key].line
                self.refuse(
                    line_of_key, f"key {key!r} is written twice (first in line {first}); remove one"
                )
            else:
                entries[key] = replace(child, line=line_of_key)
        # A key that is written out wins over one that << merges.
        children = {**merged, **entries}
        return _make_parent(line, {key: child.value for key, child in children.items()}, children)

    def merge(self, node: _Node, line: int) -> dict[str | int, _Node]:
        """Returns what `<<` adds; earlier mappings of a list win, as in YAML 1.1."""
        sources = list(node.children.values()) if isinstance(node.value, list) else [node]
        merged: dict[str | int, _Node] = {}
        # Reversed, so that earlier mappings overwrite later ones.
        for source in reversed(sources):
            if not isinstance(source.value, dict):
                self.refuse(line, "<< merges mappings only; give it an alias of a mapping")
            merged |= source.children
        return merged

    def text(self, event: yaml.ScalarEvent) -> str:
        value: str = event.value
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            self.refuse(_line(event), "text with a NUL or half a character; remove the escape")
        return value

    def scalar(self, event: yaml.ScalarEvent) -> Any:
        text = self.text(event)
        # Quoted text is text, even if it looks like a number.
        if not event.implicit[0]:
            return text
        for pattern, convert in _SCALARS:
            if pattern.fullmatch(text):
                if len(text) > _MAX_DIGITS:
                    self.refuse(_line(event), f"a number of {len(text)} digits; shorten it")
                return convert(text)
        return text


def _make_parent(line: int, value: Any, children: dict[str | int, _Node]) -> _Node:
    depth = 1 + max((child.depth for child in children.values()), default=0)
    return _Node(line, value, children, depth=depth)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _refuse(origin: str, line: int | None, message: str) -> NoReturn:
    raise ScenarioError([ScenarioProblem(message, (), origin, line)])


def _remedy(problem: str) -> str:
    if "\\t" in problem:
        return "; indent with spaces, not with tabs"
    if "mapping values are not allowed" in problem:
        return "; put text that holds ': ' in quotes, or check the indentation"
    if "expected ',' or" in problem or "expected the node content" in problem:
        return "; check that every bracket and brace is closed"
    if "quoted scalar" in problem or "end of stream" in problem:
        return "; check that every quote is closed"
    return "; check the indentation and the punctuation of this line and the one before"
