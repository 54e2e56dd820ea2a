"""A network's body in stages, each of which its own gradient determines.

Between its layers a body computes maps. Of a stretch of layers whose outputs and error signals are
known for every image, the gradient of its parameters and the outputs themselves are equations for
the maps that went in. Where they are enough, the stretch can be inverted on its own: a stage.

Whatever a body's code does between its modules (functions, shortcuts, views), a stretch of it can
be run on its own: the code runs as it is, but modules called before the stretch answer what they
once did, the one at whose answer it begins answers what is handed in, and the run is over with the
answer at which it ends. Where all that follows depends on images through one answer alone,
stretches put together are the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from fedsim.rng import generator
from fedsim.types import Observation
from fedsim_attacks.fast_autograd._second_order import replace_forward
from fedsim_attacks.images_from_features._body_gradient import Body, Part

_Visit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _StageCall:
    """One call of a module."""

    after: int
    """Number of calls that have begun once this one has ended."""
    answer: Any = None
    version: int | None = None
    """Version counter of the answer; None if it is no map of numbers."""


class _EndReached(BaseException):
    """A run is where its stretch ends. Not an `Exception`, which a body's code may catch."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer


@final
class BodyCalls:
    """Calls of modules in one pass through a body, numbered in the order in which they begin.

    The forward functions of the body's modules are replaced for good, and compute what they did.
    """

    def __init__(self, body: nn.Module, images: Tensor) -> None:
        """Notes the calls that `body` makes for `images` (N, C, H, W)."""
        self._body, self._images = body, images
        self._visit: _Visit | None = None
        for module in body.modules():
            # The forward function of a compiled module cannot be replaced.
            if not isinstance(module, torch.jit.ScriptModule):
                replace_forward(module, partial(self._intercept, module.forward))
        # Images are leaves of the graph, so that a path from them around a cut shows.
        self._variable = images.detach().clone().requires_grad_()
        with torch.enable_grad():
            calls, output = self._note(self._variable)
        self._output, self._output_size = output.grad_fn, output.numel()
        # An answer that was written to afterwards is no longer what followed from its call.
        self._maps = {
            number: (call.answer.grad_fn, call.answer.numel())
            for number, call in enumerate(calls)
            if call.version is not None and call.version == call.answer._version
        }
        """Graph node and size of the answer of each call that is a map."""
        with torch.no_grad():  # answers that are kept hold no graph
            self._calls = self._note(images)[0]

    def cuts(self, weights: set[int]) -> list[int]:
        """Lists the calls at which the body can be cut in two, in the order in which they end.

        All that follows such a call depends on images through its answer alone. `weights` are ids
        of parameters: some are used before the cut, some behind it, and none on both sides. Of
        several cuts between the same parameters, the last is listed.
        """
        found: dict[int, int] = {}
        for number in sorted(self._maps, key=lambda each: (self._calls[each].after, -each)):
            node = self._maps[number][0]
            before, behind = _leaves(node, None), _leaves(self._output, node)
            # Another way from the images past this answer, or a shared weight, makes it no cut.
            whole = id(self._variable) not in behind and not before & behind
            if whole and weights & before and weights & behind:
                found[len(weights & before)] = number
        return list(found.values())

    def leaves(self, begin: int | None, end: int | None) -> set[int]:
        """Returns the ids of the parameters used between the calls `begin` and `end`.

        None stands for the beginning, or the end, of the body.
        """
        # What was computed before the stretch begins is no part of it.
        stop = None if begin is None else self._maps[begin][0]
        return _leaves(self._output if end is None else self._maps[end][0], stop)

    def size(self, end: int | None) -> int:
        """Returns the number of entries in the answer of call `end`; None stands for the body."""
        return self._output_size if end is None else int(self._maps[end][1])

    def stretch(self, begin: int | None, end: int | None) -> Callable[[Tensor], Tensor]:
        """Returns the function from the answer of call `begin` to that of call `end`.

        None stands for the images as `begin`, and for the body's output as `end`.
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
                # Calls before the stretch, with all inside them, answer what they once did.
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

    def _note(self, images: Tensor) -> tuple[list[_StageCall], Tensor]:
        calls: list[_StageCall] = []

        def visit(
            forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            call = _StageCall()
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

    def _intercept(self, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
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


_MARGIN = 2.0
"""Equations for each unknown number of a stage that is inverted on its own."""
_KNOWN = 0.5
"""Share of a map's values that are equations: ReLU has set the others to zero."""
_NARROWEST = 0.1
"""Width of jumps at the end, over that of the beginning."""


@final
@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a body, and what is known of the inputs of the first."""

    part: Part
    """Its function and parameters."""
    shape: torch.Size
    """Shape (N, ...) of its inputs."""
    size: float
    """Root mean square of its inputs, for random images."""
    positive: bool
    """Whether its inputs are never negative, as behind ReLU."""


@final
class StagedBody:
    """A victim's body in stages, with the width of its slopes' jumps."""

    def __init__(
        self, observation: Observation, num_images: int, rng: torch.Generator, *, width: float
    ) -> None:
        """Cuts the body into stages; `width` is as for `Body`, at first.

        `num_images` is the size of the batches that stages get, and `rng` is on the CPU.
        """
        self._full = width
        device = next(iter(observation.parameters.values())).device
        self._width = torch.tensor(float(width), device=device)
        self.body = Body(observation, self._width)
        self.stages = cut_into_stages(self.body, num_images, rng)

    def narrow(self, done: float) -> None:
        """Sets the width of the smoothed jumps, which shrinks over a descent.

        `done` in [0, 1] is the share of the descent that is over. The width falls geometrically, to
        a tenth at 1. Wide jumps lead near the answer, where few neurons are on the wrong side of
        theirs.
        """
        self._width.fill_(self._full * _NARROWEST**done)

    @property
    def contrast_seen(self) -> float:
        """Relative change of the first stage's outputs if images get 2 to 3 times the contrast.

        Each image gets a factor of its own, as batch norm in train mode undoes one that all share.
        The change is nearly 0 behind group norm, a few hundredths if the layer before has a bias.
        It exceeds 1 where nothing is normalized.
        """
        stage = self.stages[0]
        images = torch.randn(stage.shape, generator=generator(0, "contrast"))
        images = images.to(next(self.body.model.parameters()).device)
        with torch.no_grad():
            # One factor for all would be undone by batch norm in train mode.
            factors = torch.linspace(2, 3, len(images)).to(images).view(-1, 1, 1, 1)
            one, two = stage.part.function(images), stage.part.function(factors * images)
        return float((two - one).norm() / one.norm())

    def maps(self, images: Tensor) -> list[Tensor]:
        """Lists the inputs (N, ...) of each stage and the last one's outputs, at given `images`.

        Images are normalized, (N, C, H, W).
        """
        maps = [images]
        with torch.no_grad():
            for stage in self.stages:
                maps.append(stage.part.function(maps[-1]))
        return maps


def cut_into_stages(body: Body, num_images: int, rng: torch.Generator) -> list[Stage]:
    """Cuts a body into stages from images to features, for batches of `num_images`.

    Returns a single stage where a stage's gradient would not determine its inputs. So it does where
    the stages together do not compute the body's features, as where code branches on values.
    `rng`, on the CPU, draws the images on which the body is tried.
    """
    images = torch.randn(num_images, *body.input_shape, generator=rng)
    images = images.to(next(body.model.parameters()).device)
    every = body.parameters(body.model.body)
    # Noted with other images, so that a body whose way depends on them is found out below.
    calls = BodyCalls(body.model.body, -images)
    ends: list[int | None] = [None]
    parts: list[list[tuple[str, Tensor]]] = []
    for begin in reversed(calls.cuts({id(p) for _, p in every if p.ndim > 1})):
        used = calls.leaves(begin, ends[0])
        inside = [(name, p) for name, p in every if id(p) in used]
        # Outputs and the gradient of parameters are equations, the map that goes in is unknown.
        equations = _KNOWN * calls.size(ends[0]) + sum(p.numel() for _, p in inside)
        if equations >= _MARGIN * calls.size(begin):
            ends.insert(0, begin)
            parts.insert(0, inside)
    taken = {name for part in parts for name, _ in part}
    # What is no stage of its own belongs to the first, which goes from images to the first cut.
    parts.insert(0, [(name, p) for name, p in every if name not in taken])
    functions = [calls.stretch(*each) for each in pairwise([None, *ends])]
    maps = [images]
    with torch.no_grad():
        for function in functions:
            maps.append(function(maps[-1]))
        if not torch.allclose(body.model.features(images), maps[-1].flatten(1)):
            functions, parts = [body.model.features], [every]
    return [
        Stage(
            Part(function, part),
            entering.shape,
            size=float(entering.square().mean().sqrt()),
            positive=bool((entering >= 0).all()),
        )
        for function, part, entering in zip(functions, parts, maps, strict=False)
    ]
