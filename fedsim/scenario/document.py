"""Reading YAML into plain values, with the line of every key.

The YAML is that of version 1.2 (core schema): `1e-3` is a number, `no` and `2024-01-01` are text.
Keys are always text. Tags are refused, and anchors can only be expanded so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fedsim.scenario.location import KeyPath, Problem, ScenarioError, parse

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 50_000
"""Values in a document, counting what aliases repeat."""

_SCALARS: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"(~|null|Null|NULL)?"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


@dataclass(frozen=True)
class Mark:
    """Where a value is written."""

    origin: str
    line: int | None = None


@dataclass(frozen=True)
class Document:
    """A scenario as written: plain values, and where each of them stands."""

    value: Any
    """Mappings with text keys, lists, text, numbers, booleans, None."""
    marks: Mapping[KeyPath, Mark] = field(default_factory=dict)

    def mark(self, path: KeyPath) -> Mark:
        """Where `path` is written; where it is absent, where its nearest parent is."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return Mark("")

    def problem(self, path: KeyPath, message: str) -> Problem:
        """What is wrong with the value at `path`, with its place."""
        mark = self.mark(path)
        return Problem(message, path, mark.origin, mark.line)

    def error(self, path: str, message: str) -> ScenarioError:
        """The error to raise for what is wrong with the value at `path` (`data.clients`, say)."""
        return ScenarioError([self.problem(parse(path), message)])


def read(path: str | Path) -> Document:
    """The scenario file at `path`, not yet validated.

    Raises:
        ScenarioError: it cannot be read, is not UTF-8 or not YAML, or is beyond the limits.
    """
    origin = str(path)
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        _refuse(origin, None, "no such file; check the path")
    except OSError as error:
        _refuse(origin, None, f"cannot be read: {error.strerror or error}; check the path")
    except ValueError as error:
        _refuse(repr(origin), None, f"is no file name ({error}); check the path")
    if len(raw) > MAX_BYTES:
        _refuse(origin, None, f"larger than {MAX_BYTES:,} bytes; a scenario is a short text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        _refuse(origin, line, "not UTF-8 text; save the file with the encoding UTF-8")
    return parse_yaml(text, origin)


def parse_yaml(text: str, origin: str, *, lines: bool = True) -> Document:
    """`text` as a document; `origin` is what errors call it, without line numbers if not `lines`.

    Raises:
        ScenarioError: it is not YAML, or is beyond the limits.
    """
    parser = _Parser(origin, lines)
    try:
        return parser.document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context or "cannot be parsed"
        parser.refuse(mark, f"not valid YAML: {said}{_remedy(said)}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if lines else None
        character = error.character
        shown = f"U+{character:04X}" if isinstance(character, int) else repr(character)
        _refuse(origin, line, f"control character {shown} is not allowed in YAML; remove it")


class _Parser:
    """Builds plain values from YAML events, keeping lines and limits."""

    def __init__(self, origin: str, lines: bool) -> None:
        self.origin = origin
        self.lines = lines
        self.nodes = 0
        self.depth = 0
        self.anchors: dict[str, _Node | None] = {}

    def refuse(self, mark: yaml.Mark | None, message: str) -> NoReturn:
        _refuse(self.origin, mark.line + 1 if mark and self.lines else None, message)

    def document(self, events: Iterator[yaml.Event]) -> Document:
        root: _Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root:
                    self.refuse(event.start_mark, "a second document begins; keep one per file")
                root = self.node(next(events), events)
        if root is None:
            self.refuse(None, "empty; a scenario needs at least name, data, model and attacks")
        marks: dict[KeyPath, Mark] = {}
        self.collect(root, (), marks)
        marks[()] = Mark(self.origin)
        return Document(root.value, marks)

    def collect(self, node: _Node, path: KeyPath, marks: dict[KeyPath, Mark]) -> None:
        marks[path] = Mark(self.origin, node.line if self.lines else None)
        for key, child in node.children.items():
            self.collect(child, (*path, key), marks)

    def node(self, event: yaml.Event, events: Iterator[yaml.Event]) -> _Node:
        before = self.nodes
        self.nodes += 1
        if isinstance(event, yaml.AliasEvent):
            node = self.alias(event)
        else:
            assert isinstance(event, yaml.NodeEvent)  # noqa: S101 - the only other kind
            if event.tag not in (None, "!"):
                self.refuse(event.start_mark, f"tag {event.tag!r} is not supported; remove it")
            if event.anchor:
                self.anchors[event.anchor] = None
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.refuse(event.start_mark, f"nested deeper than {MAX_DEPTH} levels; flatten it")
            line = event.start_mark.line + 1
            if isinstance(event, yaml.ScalarEvent):
                node = _Node(line, self.scalar(event))
            elif isinstance(event, yaml.SequenceStartEvent):
                node = self.sequence(line, events)
            else:
                node = self.mapping(line, events)
            self.depth -= 1
            node = replace(node, size=self.nodes - before)
            if event.anchor:
                self.anchors[event.anchor] = node
        if self.nodes > MAX_NODES:
            self.refuse(
                event.start_mark, f"more than {MAX_NODES:,} values; shorten it or use fewer aliases"
            )
        return node

    def alias(self, event: yaml.AliasEvent) -> _Node:
        target = self.anchors.get(event.anchor)
        if target is None:
            known = "refers to itself" if event.anchor in self.anchors else "has no anchor before it"
            self.refuse(event.start_mark, f"alias *{event.anchor} {known}; write the value out")
        self.nodes += target.size
        return replace(target, line=event.start_mark.line + 1)

    def sequence(self, line: int, events: Iterator[yaml.Event]) -> _Node:
        items: list[_Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self.node(event, events))
        return _Node(line, [item.value for item in items], dict(enumerate(items)))

    def mapping(self, line: int, events: Iterator[yaml.Event]) -> _Node:
        own: dict[str, _Node] = {}
        merged: dict[str, _Node] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.refuse(event.start_mark, "a key has to be plain text; write it as one word")
            key, key_line = self.text(event), event.start_mark.line + 1
            child = self.node(next(events), events)
            if key == "<<" and event.implicit[0]:
                merged = {**self.merge(child, event.start_mark), **merged}
                continue
            if key in own:
                self.refuse(
                    event.start_mark,
                    f"key {key!r} is written twice (first in line {own[key].line}); remove one",
                )
            own[key] = replace(child, line=key_line)
        children: dict[str | int, _Node] = {**merged, **own}
        return _Node(line, {key: child.value for key, child in children.items()}, children)

    def merge(self, node: _Node, mark: yaml.Mark) -> dict[str, _Node]:
        sources = list(node.children.values()) if isinstance(node.value, list) else [node]
        merged: dict[str, _Node] = {}
        for source in reversed(sources):
            if not isinstance(source.value, dict):
                self.refuse(mark, "<< merges mappings only; give it an alias of a mapping")
            merged |= {str(key): child for key, child in source.children.items()}
        return merged

    def text(self, event: yaml.ScalarEvent) -> str:
        value: str = event.value
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value):
            self.refuse(event.start_mark, "text with a NUL or half a character; remove the escape")
        return value

    def scalar(self, event: yaml.ScalarEvent) -> Any:
        text = self.text(event)
        if not event.implicit[0]:
            return text
        for pattern, convert in _SCALARS:
            if pattern.fullmatch(text):
                try:
                    return convert(text)
                except ValueError:  # Python refuses integers of more than 4300 digits
                    self.refuse(event.start_mark, f"a number of {len(text)} digits; shorten it")
        return text


@dataclass(frozen=True)
class _Node:
    line: int
    value: Any
    children: Mapping[Any, _Node] = field(default_factory=dict)
    size: int = 1


def _refuse(origin: str, line: int | None, message: str) -> NoReturn:
    raise ScenarioError([Problem(message, (), origin, line)])


def _remedy(said: str) -> str:
    if "\\t" in said:
        return "; indent with spaces, not with tabs"
    if "mapping values are not allowed" in said:
        return "; put text that holds ': ' in quotes, or check the indentation"
    if "expected ',' or" in said or "expected the node content" in said:
        return "; check that every bracket and brace is closed"
    if "quoted scalar" in said or "end of stream" in said:
        return "; check that every quote is closed"
    return "; check the indentation and the punctuation of this line and the one before"
