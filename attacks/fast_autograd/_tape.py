"""Tape: a function of tensors as the flat list of the operations that it ran.

An iteration of gradient matching takes hundreds to thousands of short operations, and some of its
time goes to Python and autograd around them: 13 % on the default ConvNet, 3 to 10 % on ResNet-18 on
a processor, and most of it on a GPU, which waits for the next operation to be asked for. The
operations of one iteration are those of every other, so that they are recorded once and then run
without either. A replay computes the same bits (on a GPU, the same but for the order of its sums),
which is checked once, before it is used. What is recorded stays as it was: see `Tape`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Function = Callable[..., tuple[Tensor, ...]]
"""Function of tensors that can be recorded."""

PAYS = 2000
"""Least number of calls that pay for a recording on a processor, which takes as long as 450
(ConvNet) to 3,500 (ResNet-18) replays gain."""
PAYS_ON_GPU = 20
"""The same on a GPU, where recording takes as long as a few calls."""
_WARM = 2  # calls outside of the graph before it is captured: libraries prepare themselves in them
_READING = {"_local_scalar_dense", "nonzero", "masked_select", "item", "equal"}
"""Operations whose result decides, on the processor, what is done next."""
_ALIKE = 1e-3  # relative distance of a GPU's results up to which their order differs alone


def tape_if_it_pays(function: Function, calls: int, device: torch.device) -> Function:
    """Returns `function` on a `Tape` if so many `calls` on `device` pay for it, else as it is."""
    least = PAYS_ON_GPU if device.type == "cuda" else PAYS
    return Tape(function) if calls >= least else function


class Tape:
    """`function` (tensors of fixed shapes to tensors), replayed from the third call on.

    Where it cannot be recorded (it branches on values) or does not repeat its results, it goes on
    as it is. Gradients do not flow through a replay. A number that changes has to be an input or a
    tensor: whatever else the function reads is recorded as it was.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._recorded: Function | None = None
        self._calls = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns what `function` returns for `inputs`, by a replay where there is one."""
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
        # Its values are others: here it shows if the recording depends on those of the first.
        if self._calls == 2:
            results = self._function(*inputs)
            if not all(map(_same, results, replayed)):
                self._recorded = None
            return results
        return replayed


@final
class _NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations for which the processor waits: they cannot be captured."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, result)) if isinstance(each, Tensor)]
        if name in _READING or len({each.device for each in tensors}) > 1:
            raise RuntimeError(f"{name} reads a value, or reads from another device")
        return result


@final
class _Graph:
    """A function's operations on a GPU as a CUDA graph, which one call starts as a whole."""

    def __init__(self, function: Function, inputs: tuple[Tensor, ...]) -> None:
        """Captures the operations of `function` on copies of `inputs`, which lie on one device."""
        self._inputs = [each.detach().clone() for each in inputs]
        self._device = inputs[0].device
        with torch.cuda.device(self._device):
            self._capture(function)

    def _capture(self, function: Function) -> None:
        present = torch.cuda.current_stream()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Warm-up runs beside the present stream, as PyTorch's page on CUDA graphs asks for.
        beside.wait_stream(present)
        with torch.cuda.stream(beside):
            for _ in range(_WARM):
                function(*self._inputs)
        present.wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        # A graph that the collector frees while another is captured would spoil that one.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self._graph):
                self._results = function(*self._inputs)
        finally:
            if collects:
                gc.enable()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self._inputs, inputs, strict=True):
            # A graph reads the addresses that it was captured with.
            own.copy_(given)
        with torch.cuda.device(self._device):
            self._graph.replay()
        # The results lie in the graph's memory, which the next replay overwrites.
        return tuple(each.detach().clone() for each in self._results)


def _record(function: Function, inputs: tuple[Tensor, ...]) -> Function | None:
    try:
        copies = [each.detach().clone() for each in inputs]
        if inputs[0].is_cuda:
            # A capture that fails may leave its stream behind: what reads values is not captured.
            with _NoReading():  # type: ignore[no-untyped-call]
                function(*copies)
            return _Graph(function, inputs)
        # Imported here: it takes long, and few descents are long enough to be recorded.
        from torch.fx.experimental.proxy_tensor import make_fx

        # `make_fx` counts the arguments of a method wrongly.
        recorded: Function = make_fx(lambda *given: function(*given))(*copies)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return recorded


def _same(result: Tensor, replayed: Tensor) -> bool:
    if torch.equal(result, replayed):
        return True
    if not result.is_cuda:
        return False
    return bool((result - replayed).norm() <= _ALIKE * result.norm())
