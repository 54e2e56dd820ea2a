"""Reads the descriptions of plugins without the libraries that they compute with."""

from __future__ import annotations

import gc
import json
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LIBRARIES = frozenset(
    {"cryptography", "flwr", "safetensors", "scipy", "skimage", "threadpoolctl", "torch"}
    | {"torchvision"}
)
"""Libraries that modules of plugins import and that descriptions do not need."""


class _Kind(ABCMeta):
    """Metaclass of stand-ins, whose every attribute is another stand-in; classes may mix in ABC."""

    def __getattr__(cls, name: str) -> type:
        # Python asks for special names to learn what an object can do: these have to be missing.
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _StandIn(metaclass=_Kind):
    """Stands in for a base class, or for a decorator that changes nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Takes whatever the real one takes."""

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Module(ModuleType):
    """Stands in for a module, and has whatever is imported from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] in LIBRARIES:
            # As a package, so that its submodules are looked for, and found here, as well.
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: a stand-in has no code."""


def read_without_libraries(read: Callable[[], Any], *groups: str) -> Any:
    """Returns the value of `read()`, where possible without importing torch and other `LIBRARIES`.

    A forked process calls it with empty stand-ins for them, and returns its value through JSON. If
    a library is imported already, that process fails, or a plugin of the entry-point `groups` does
    not load there, this process calls `read`.
    """
    # What is imported already costs nothing more.
    if sys.modules.keys() & LIBRARIES:
        return read()
    receiver, sender = os.pipe()
    # A fork can call `read`, a closure that no other process could be handed.
    child = os.fork()
    if child == 0:
        _answer(read, groups, sender)
    os.close(sender)
    with os.fdopen(receiver, encoding="utf-8") as answer:
        # Read to its end before the wait: a child whose pipe is full would never end.
        text = answer.read()
    _, status = os.waitpid(child, 0)
    # Where stand-ins were not enough, this process imports the libraries after all.
    return json.loads(text) if status == 0 else read()


def _answer(read: Callable[[], Any], groups: Sequence[str], sender: int) -> None:
    """Writes the value of `read` and ends this process, with status 1 if a plugin fails to load."""
    status = 1
    # This process ends at once: searching a thousand new classes for garbage would only cost time.
    gc.disable()
    try:
        sys.meta_path.insert(0, _Finder())
        text = json.dumps(read())
        from fedsim.contracts import plugins

        # The text may call a plugin broken that only a stand-in broke: then the parent reads.
        for group in groups:
            for name in plugins.names(group):
                plugins.load(group, name)
        with os.fdopen(sender, "w", encoding="utf-8") as answer:
            answer.write(text)
        status = 0
    finally:
        # Not `sys.exit`: what this process registered for its end is the parent's to do.
        os._exit(status)


def _stand_in(name: str) -> type:
    return _Kind(name, (_StandIn,), {})
