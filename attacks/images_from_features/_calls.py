"""The calls that a body makes of its modules, and runs of the stretch between two of them.

Whatever a body's code does between its modules (functions, shortcuts, views), a stretch of it can
be run on its own: the code runs as it is, but modules called before the stretch answer what they
once did, the one at whose answer it begins answers what is handed in, and the run is over with the
answer at which it ends. Where all that follows depends on images through one answer alone,
stretches put together are the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from fedsim_attacks.fast_autograd._second_order import replace_forward

_Visit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Call:
    """One call of a module."""

    after: int
    """Number of calls that have begun once this one has ended."""
    answer: Any = None
    version: int | None = None
    """How often the answer had been written to; None if it is no map of numbers."""


class _EndReached(BaseException):
    """A run is where its stretch ends. Not an `Exception`, which a body's code may catch."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer


@final
class BodyCalls:
    """The calls of one pass through a body, numbered in the order in which they begin."""

    def __init__(self, body: nn.Module, images: Tensor) -> None:
        """Notes the calls that `body` makes for `images` (N, C, H, W)."""
        self._body, self._images = body, images
        self._visit: _Visit | None = None
        for module in body.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                replace_forward(module, partial(self._called, module.forward))
        self._variable = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            calls, output = self._note(self._variable)
        self._output, self._output_size = output.grad_fn, output.numel()
        self._maps = {
            number: (call.answer.grad_fn, call.answer.numel())
            for number, call in enumerate(calls)
            if call.version is not None and call.version == call.answer._version
        }
        """Of each call whose answer is a map: what computed it, and its size."""
        with torch.no_grad():  # answers that are kept hold no graph
            self._calls = self._note(images)[0]

    def cuts(self, weights: set[int]) -> list[int]:
        """Lists the calls on whose answer alone all that follows depends, in order of their ends.

        Some of the parameters with the ids `weights` are used before it, some behind it, and none
        on both sides. Of answers between the same two of them it is the last.
        """
        found: dict[int, int] = {}
        for number in sorted(self._maps, key=lambda each: (self._calls[each].after, -each)):
            node = self._maps[number][0]
            before, behind = _leaves(node, None), _leaves(self._output, node)
            whole = id(self._variable) not in behind and not before & behind
            if whole and weights & before and weights & behind:
                found[len(weights & before)] = number
        return list(found.values())

    def leaves(self, begin: int | None, end: int | None) -> set[int]:
        """Returns the ids of the parameters that the stretch uses."""
        stop = None if begin is None else self._maps[begin][0]
        return _leaves(self._output if end is None else self._maps[end][0], stop)

    def size(self, end: int | None) -> int:
        """Returns how many numbers a call answers, or for None the body."""
        return self._output_size if end is None else int(self._maps[end][1])

    def stretch(self, begin: int | None, end: int | None) -> Callable[[Tensor], Tensor]:
        """Returns the function from one call's answer to another's.

        None is for the images at the beginning, and for the body's answer at the end.
        """
        calls = self._calls

        def function(entering: Tensor) -> Tensor:
            following = 0

            def visit(
                forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
            ) -> Any:
                nonlocal following
                number = following
                following += 1
                if begin is not None and (number == begin or calls[number].after <= begin):
                    following = calls[number].after
                    return entering if number == begin else calls[number].answer
                answer = forward(*arguments, **named)
                if number == end:
                    raise _EndReached(answer)
                return answer

            with self._visiting(visit):
                try:
                    output: Tensor = self._body(entering if begin is None else self._images)
                except _EndReached as reached:
                    return reached.answer
            return output

        return function

    def _note(self, images: Tensor) -> tuple[list[_Call], Tensor]:
        calls: list[_Call] = []

        def visit(
            forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            call = _Call()
            calls.append(call)
            try:
                call.answer = answer = forward(*arguments, **named)
            finally:
                call.after = len(calls)
            maps = isinstance(answer, Tensor) and answer.is_floating_point()
            if maps and answer.shape[:1] == images.shape[:1]:
                call.version = answer._version
            return answer

        with self._visiting(visit):
            output: Tensor = self._body(images)
        return calls, output

    def _called(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._visit is None:
            return forward(*arguments, **named)
        return self._visit(forward, arguments, named)

    @contextmanager
    def _visiting(self, visit: _Visit) -> Iterator[None]:
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None


def _leaves(node: Any, stop: Any) -> set[int]:
    """Returns the ids of the tensors that `node` was computed from, but for those behind `stop`."""
    found: set[int] = set()
    known, waiting = {stop}, [node]
    while waiting:
        each = waiting.pop()
        if each is None or each in known:
            continue
        known.add(each)
        if (variable := getattr(each, "variable", None)) is not None:
            found.add(id(variable))
        waiting += [following for following, _ in each.next_functions]
    return found
