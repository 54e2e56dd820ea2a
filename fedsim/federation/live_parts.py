"""Finds the mods and strategies that an app of Flower's really runs, on the live objects.

Flower keeps no list that a mod or a grid could ask for. It makes one function of a ClientApp's
mods, each of which holds the next in a closure. A strategy's `start` is among the grid's callers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedsim.recording.deployed_parts import DeployedPart, describe_part

_NEXT, _MOD = "_ffn", "_mod"
"""Variables of Flower's `make_ffn` that hold the next function, and the mod that is called."""


def list_mods(call_next: Callable[..., Any]) -> list[DeployedPart]:
    """Returns the mods of the ClientApp whose mod calls this, outermost first.

    `call_next` is what the calling mod was handed. fedsim's own mods are left out.
    """
    # Mods further out have called on and wait: they are among the frames of this thread.
    outer = [f.f_locals[_MOD] for f in _frames() if {_NEXT, _MOD} <= f.f_locals.keys()]
    found = [*reversed(outer), *_list_inner(call_next)]
    described = [describe_part(mod) for mod in found]
    return [each for each in described if not each.name.startswith("fedsim.")]


def _list_inner(function: Callable[..., Any]) -> Iterator[Any]:
    while inspect.isfunction(function):
        held = inspect.getclosurevars(function).nonlocals
        # The innermost function is the app's own, which holds neither.
        if not {_NEXT, _MOD} <= held.keys():
            return
        yield held[_MOD]
        function = held[_NEXT]


def find_strategy() -> Strategy | None:
    """Returns the outermost strategy among the callers of this function; None if there is none."""
    callers = (frame.f_locals.get("self") for frame in _frames())
    found = [each for each in callers if isinstance(each, Strategy)]
    # Frames come innermost first, so that the last is the outermost.
    return found[-1] if found else None


def list_strategies(strategy: Strategy) -> list[DeployedPart]:
    """Returns a strategy and those that it wraps, outermost first, with their accountants.

    What an accountant is told and has counted are settings of its strategy: `accountant_epsilon`,
    `accountant_releases`, `accountant_delta` and `accountant_max_epsilon`.
    """
    found = []
    inner: Any = strategy
    while isinstance(inner, Strategy):
        found.append(describe_part(inner, _read_accountant(inner)))
        # A wrapper of Flower's keeps what it wraps under this name.
        inner = getattr(inner, "strategy", None)
    return found


def _read_accountant(strategy: Strategy) -> dict[str, Any]:
    """Returns what a strategy's accountant is told and has counted, as settings; empty if none."""
    accountant = getattr(strategy, "accountant", None)
    if accountant is None:
        return {}
    spent, config = accountant.get_privacy_spent(), accountant.config
    return {
        "accountant_epsilon": spent.epsilon,
        "accountant_releases": spent.num_releases,
        "accountant_delta": config.target_delta,
        "accountant_max_epsilon": config.max_epsilon,
    }


def _frames() -> Iterator[FrameType]:
    """Yields the frames of this thread's calls, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
