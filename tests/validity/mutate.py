"""Faults put into a module's syntax tree, so that neither format nor line breaks matter to them.

A mutation names a file, a function and a piece of Python that stands there exactly once; the piece
is looked for by syntax. `...` in it is any expression, `f(...)` is a call of `f` whatever its
arguments, `a=1` is an assignment or an argument, and `{"a": b}` is an item of a dictionary.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

Piece = ast.AST | tuple[ast.expr | None, ast.expr]
"""A node, or one key and value of a dictionary."""
_ITEMS = "items"
"""Stands for the keys and values of a dictionary, as a field of it."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One fault, put back by a change of one piece of syntax in one function."""

    name: str = ""
    """What is wrong then, in a few words."""
    file: str
    function: str
    """Qualified name; empty if the piece is looked for in the whole file."""
    old: str
    new: str | None
    """What takes its place; None if the piece is left out."""
    tests: tuple[str, ...]
    """Files or node ids of the fast tests of which at least one fails then."""
    condition: bool = False
    """Whether the piece is the whole condition of an `if`, a loop or a conditional expression."""

    def apply(self, source: str) -> str:
        """Returns the source of `file` with the fault.

        Raises:
            LookupError: the piece does not stand there exactly once.
        """
        if not self.file.endswith(".py"):
            self._require_one(source.count(self.old))
            return source.replace(self.old, self.new or "")
        tree = ast.parse(source)
        self.locate(tree).put([] if self.new is None else ast.parse(self.new).body)
        return ast.unparse(ast.fix_missing_locations(tree))

    def locate(self, tree: ast.Module) -> _Place:
        """Returns where the piece stands in the module of `file`.

        Raises:
            LookupError: it does not stand there exactly once.
        """
        pattern = _parse(self.old)
        places = [
            place
            for scope in _scopes(tree, self.function)
            for place in _places(scope)
            if place.holds(pattern) and (place.field == "test" or not self.condition)
        ]
        self._require_one(len(places))
        return places[0]

    def _require_one(self, count: int) -> None:
        if count != 1:
            where = f"{self.file}:{self.function}"
            raise LookupError(
                f"mutation {self.name!r}: expected `{self.old}` once in {where}, found it "
                f"{count} times; adapt it in tests/validity/mutations.py"
            )


def read_table(text: str) -> tuple[Mutation, ...]:
    """Reads faults: a name and, indented, `file:function [tests] old => new`; `#` is a comment.

    In place of `old => new` is `drop old`, where a statement, an argument or an element is missing
    then, or `never condition`, which does not hold then, whatever happens. Tests are files or node
    ids below `tests`, without `.py`.
    """
    entries = re.findall(r"^(\w.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    return tuple(_read(name, textwrap.dedent(body).strip()) for name, body in entries)


def _read(name: str, body: str) -> Mutation:
    found = re.fullmatch(r"([^\s:]+):?(\S*)\s\[([^]]*)\]\s(.*)", body, re.DOTALL)
    assert found, f"{name}: {body}"
    file, function, tests, change = found.groups()
    verb, _, rest = change.partition(" ")
    condition = verb == "never"
    old, *new = re.split(r"\s=>", rest if verb in ("drop", "never") else change)
    return Mutation(
        name=name,
        file=file,
        function=function,
        old=old.strip(),
        new="False" if condition else new[0].strip() if new else None,
        tests=tuple(_test_of(test) for test in re.split(r",\s+", tests)),
        condition=condition,
    )


def _test_of(short: str) -> str:
    file, *inside = re.sub(r"\s", "", short).split("::")
    return "::".join([f"tests/{file}.py", *inside])


@dataclass(frozen=True)
class _Place:
    """Where a piece of syntax hangs: a field of its parent, or the place in the field's list."""

    parent: ast.AST
    field: str
    index: int | None

    def piece(self) -> Piece:
        if isinstance(self.parent, ast.Dict) and self.field == _ITEMS and self.index is not None:
            return self.parent.keys[self.index], self.parent.values[self.index]
        value = getattr(self.parent, self.field)
        node: ast.AST = value if self.index is None else value[self.index]
        return node

    def holds(self, pattern: Piece) -> bool:
        piece = self.piece()
        if isinstance(piece, ast.Expr):  # A statement that is an expression alone
            piece = piece.value
        if isinstance(piece, ast.keyword) and isinstance(pattern, ast.Assign):
            name = pattern.targets[0]
            return (
                isinstance(name, ast.Name)
                and name.id == piece.arg
                and _same(pattern.value, piece.value)
            )
        return _same(pattern, piece)

    def put(self, statements: list[ast.stmt]) -> None:
        """Hangs `statements` there; if an expression stood there, the one that they consist of."""
        before = self.piece()
        if isinstance(before, tuple):
            self._put_items(statements)
            return
        after: list[ast.AST] = list(statements)
        if isinstance(before, ast.keyword):
            after = [_keyword(one) for one in statements]
        elif not isinstance(before, ast.stmt):
            after = [_expression(one) for one in statements]
        if self.index is None:
            setattr(self.parent, self.field, after[0])
            return
        siblings = getattr(self.parent, self.field)
        siblings[self.index : self.index + 1] = after
        if not siblings and isinstance(before, ast.stmt):
            siblings.append(ast.Pass())

    def _put_items(self, statements: list[ast.stmt]) -> None:
        assert isinstance(self.parent, ast.Dict) and self.index is not None
        items = _expression(statements[0]) if statements else ast.Dict([], [])
        assert isinstance(items, ast.Dict)
        self.parent.keys[self.index : self.index + 1] = items.keys
        self.parent.values[self.index : self.index + 1] = items.values


def _parse(text: str) -> Piece:
    statement = ast.parse(text).body[0]
    if not isinstance(statement, ast.Expr):
        return statement
    value = statement.value
    if isinstance(value, ast.Dict) and len(value.keys) == 1:
        return value.keys[0], value.values[0]
    return value


def _expression(statement: ast.stmt) -> ast.expr:
    assert isinstance(statement, ast.Expr)
    return statement.value


def _keyword(statement: ast.stmt) -> ast.keyword:
    assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    return ast.keyword(arg=statement.targets[0].id, value=statement.value)


def _scopes(tree: ast.AST, function: str) -> list[ast.AST]:
    """Every definition of that qualified name."""
    scopes = [tree]
    for name in function.split(".") if function else ():
        scopes = [
            node
            for scope in scopes
            for node in _statements(scope)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name == name
        ]
    return scopes


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All below `node` but expressions, which are most of a tree and hold no definition."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def _places(scope: ast.AST) -> Iterator[_Place]:
    for parent in ast.walk(scope):
        if isinstance(parent, ast.Dict):
            yield from (_Place(parent, _ITEMS, index) for index in range(len(parent.keys)))
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                yield from (
                    _Place(parent, field, index)
                    for index, child in enumerate(value)
                    if isinstance(child, ast.AST)
                )
            elif isinstance(value, ast.AST) and not isinstance(parent, ast.Expr):
                yield _Place(parent, field, None)


def _same(pattern: object, node: object) -> bool:
    """Whether `node` is what `pattern` stands for."""
    if isinstance(pattern, ast.Constant) and pattern.value is ...:
        return isinstance(node, ast.expr)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and _any_arguments(pattern):
        return _same(pattern.func, node.func)
    if isinstance(pattern, ast.AST):
        return all(
            _same(getattr(pattern, field, None), getattr(node, field, None))
            for field in pattern._fields
        )
    if isinstance(pattern, list | tuple) and isinstance(node, list | tuple):
        return len(pattern) == len(node) and all(map(_same, pattern, node))
    return pattern == node


def _any_arguments(call: ast.Call) -> bool:
    only = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return isinstance(only, ast.Constant) and only.value is ...
