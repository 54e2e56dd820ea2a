"""Tape: a function of tensors as the flat list of the operations that it ran.

An iteration of gradient matching takes hundreds to thousands of short operations, and some of its
time goes to Python and autograd around them: 13 % on the default ConvNet, 3 to 10 % on ResNet-18.
The operations of one iteration are those of every other, so that they are recorded once and then
run without either. A replay computes the same bits, which is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Function = Callable[..., tuple[Tensor, ...]]

PAYS = 2000
"""Calls from which on a replay gains time: recording takes what 450 (ConvNet) to 3,500 (ResNet-18)
replays gain."""


class Tape:
    """`function` (tensors of fixed shapes to tensors), replayed from the third call on.

    Where it cannot be recorded (it branches on values) or does not repeat its bits, it goes on as
    it is. Gradients do not flow through a replay.
    """

    def __init__(self, function: Function) -> None:
        """Nothing is recorded yet."""
        self._function = function
        self._recorded: Function | None = None
        self._calls = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `function` returns of `inputs`."""
        self._calls += 1
        if self._calls == 1:
            # After the first call: what a function prepares then is no part of those that follow.
            results = self._function(*inputs)
            self._recorded = _record(self._function, inputs)
            return results
        if self._recorded is None:
            return self._function(*inputs)
        with torch.no_grad():
            replayed = self._recorded(*inputs)
        if self._calls == 2:
            results = self._function(*inputs)
            if not all(map(torch.equal, results, replayed)):
                self._recorded = None
            return results
        return replayed


def _record(function: Function, inputs: tuple[Tensor, ...]) -> Function | None:
    try:
        recorded: Function = make_fx(function)(*(each.detach().clone() for each in inputs))
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return recorded
