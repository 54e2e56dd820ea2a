"""Reads what plugins say of themselves without the libraries that they compute with.

Names, docstrings and fields need no torch, whose import takes seconds. So a child process reads
them with stand-ins for such libraries, as Sphinx does by `autodoc_mock_imports`. Where a module
asks more of a stand-in than it can give, this process reads with the libraries themselves.
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LIBRARIES = frozenset({"flwr", "safetensors", "scipy", "skimage", "torch", "torchvision"})
"""What modules of plugins import that no description is made of."""


class _Kind(ABCMeta):
    """Makes every attribute of a stand-in another one; a class may derive from it and from ABC."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _StandIn(metaclass=_Kind):
    """Stands for a class to derive from, or for a decorator that changes nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Takes whatever the real one takes."""

    def __call__(self, decorated: Any) -> Any:
        """Returns what is decorated."""
        return decorated


class _Module(ModuleType):
    """Stands for a module, and has whatever is imported from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins in the place of libraries."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """Returns how a library's module is made; None of any other."""
        if fullname.partition(".")[0] in LIBRARIES:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns an empty module."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a stand-in has no code."""


def read_without_libraries(read: Callable[[], Any], *groups: str) -> Any:
    """Returns what `read` says of the plugins of `groups`, from a process without libraries.

    Args:
        read: returns a value of JSON, and imports what it needs itself.
        groups: where all plugins must be such as stand-ins are enough for.
    """
    if sys.modules.keys() & LIBRARIES:
        return read()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(read, groups, sender)
    os.close(sender)
    with os.fdopen(receiver, encoding="utf-8") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else read()


def _answer(read: Callable[[], Any], groups: Sequence[str], sender: int) -> None:
    """Writes what `read` returns and ends this process, with 1 if a plugin cannot be loaded."""
    status = 1
    try:
        sys.meta_path.insert(0, _Finder())
        text = json.dumps(read())
        from fedsim.contracts import plugins

        for group in groups:
            for name in plugins.names(group):
                plugins.load(group, name)
        with os.fdopen(sender, "w", encoding="utf-8") as answer:
            answer.write(text)
        status = 0
    finally:
        os._exit(status)


def _stand_in(name: str) -> type:
    return _Kind(name, (_StandIn,), {})
