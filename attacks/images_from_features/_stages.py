"""A network's body in stages, each of which its own gradient determines, and descents through them.

Of a stretch of layers whose outputs and error signals are known for every image, the gradient of
its parameters and the outputs are equations for the maps that went in. Where they are enough, the
stretch can be inverted on its own: a stage. Whatever a body's code does between its modules, it
runs as it is, but modules called before the stretch answer what they once did, the one at whose
answer it begins answers what is handed in, and the run is over with the answer at which it ends.

A descent over images through a deep body meets the jumps of all its layers at once, and ends far
away. `StagePeeling` finds what went into one stage after the other, down to the images (Zhu and
Blaschko, R-GAP, ICLR 2021, peel layers of one image by linear systems). What a stage's gradient
leaves open is passed on to the one before. `Relaxation` leaves everything open at once: images and
the maps between stages are variables of their own, and that a map is what the stage before makes of
its inputs is asked for more and more (Carreira-Perpiñán and Wang, Distributed Optimization of
Deeply Nested Systems, AISTATS 2014, for inputs in place of weights).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from fedsim_attacks.fast_autograd._tape import tape_if_it_pays
from fedsim_attacks.gradient_matching._drawing import Adam, half_cosine
from fedsim_attacks.images_from_features._body_gradient import (
    Body,
    LaterSteps,
    Misfit,
    Part,
    PartGradient,
    PartUpdate,
    StageTarget,
    lay_out,
    nonzero_energy,
)

_Visit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _StageCall:
    after: int  # number of calls that have begun once this one has ended
    answer: Any = None
    version: int | None = None  # version counter of the answer; None if it is no map of numbers


class _EndReached(BaseException):
    """A run is where its stretch ends. Not an `Exception`, which a body's code may catch."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer


@final
class _BodyCalls:
    """Calls of modules in one pass through a body, numbered in the order in which they begin."""

    def __init__(self, body: nn.Module, images: Tensor) -> None:
        """Notes calls for `images` (N, C, H, W), by `body`'s forward functions wrapped for good."""
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
        """Lists calls, as they end, that cut the body between parameters of ids `weights`."""
        found: dict[int, int] = {}
        # Of several cuts between the same parameters, the last is listed.
        for number in sorted(self._maps, key=lambda each: (self._calls[each].after, -each)):
            node = self._maps[number][0]
            before, behind = _leaves(node, None), _leaves(self._output, node)
            # Another way from the images past this answer, or a shared weight, makes it no cut.
            whole = id(self._variable) not in behind and not before & behind
            if whole and weights & before and weights & behind:
                found[len(weights & before)] = number
        return list(found.values())

    def leaves(self, begin: int | None, end: int | None) -> set[int]:
        """Returns ids of the parameters used between two calls; None is the beginning or end."""
        # What was computed before the stretch begins is no part of it.
        stop = None if begin is None else self._maps[begin][0]
        return _leaves(self._output if end is None else self._maps[end][0], stop)

    def size(self, end: int | None) -> int:
        """Returns the number of entries in the answer of call `end`; None stands for the body."""
        return self._output_size if end is None else int(self._maps[end][1])

    def stretch(self, begin: int | None, end: int | None) -> Callable[[Tensor], Tensor]:
        """Returns the function from the answer of `begin` to that of `end`; None as in `leaves`."""
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


_MARGIN = 2.0  # equations for each unknown number of a stage that is inverted on its own
_KNOWN = 0.5  # share of a map's values that are equations: ReLU has set the others to zero
_NARROWEST = 0.1  # width of jumps at the end, over that of the beginning


@final
@dataclass(frozen=True)
class _Stage:
    """Consecutive layers of a body, and what is known of the inputs of the first."""

    part: Part  # its function and parameters
    shape: torch.Size  # shape (N, ...) of its inputs
    size: float  # root mean square of its inputs, for random images
    positive: bool  # whether its inputs are never negative, as behind ReLU


@final
class StagedBody:
    """A victim's body in stages, with the width of its slopes' jumps."""

    def __init__(self, observation: Observation, rng: torch.Generator, *, width: float) -> None:
        """Cuts the body by random images; `width` is that of the jumps, as for `Body`, at first."""
        self._full = width
        device = observation.device
        self._width = torch.tensor(float(width), device=device)
        self.body = Body(observation, self._width)
        self.stages = _cut_into_stages(self.body, rng)

    def narrow(self, done: float) -> None:
        """Sets the width of the smoothed jumps, which falls to a tenth at `done` = 1."""
        # Wide jumps lead near the answer, where few neurons are on the wrong side of theirs.
        self._width.fill_(self._full * _NARROWEST**done)

    @property
    def contrast_seen(self) -> float:
        """Relative change of the first stage's outputs if images get 2 to 3 times the contrast."""
        stage = self.stages[0]
        images = torch.randn(stage.shape, generator=generator(0, "contrast"))
        images = images.to(next(self.body.model.parameters()).device)
        with torch.no_grad():
            # One factor for all would be undone by batch norm in train mode.
            factors = torch.linspace(2, 3, len(images)).to(images).view(-1, 1, 1, 1)
            one, two = stage.part.function(images), stage.part.function(factors * images)
        return float((two - one).norm() / one.norm())

    def maps(self, images: Tensor) -> list[Tensor]:
        """Lists the inputs (N, ...) of each stage and the last one's outputs, at given `images`."""
        maps = [images]
        with torch.no_grad():
            for stage in self.stages:
                maps.append(stage.part.function(maps[-1]))
        return maps


def _cut_into_stages(body: Body, rng: torch.Generator) -> list[_Stage]:
    """Cuts a body into stages from images to features, or returns it as one stage."""
    seen = body.observation
    images = torch.randn(seen.num_images, *seen.model.input_shape, generator=rng)
    images = images.to(next(body.model.parameters()).device)
    every = body.parameters(body.model.body)
    # Noted with other images, so that a body whose way depends on them is found out below.
    calls = _BodyCalls(body.model.body, -images)
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
        _Stage(
            Part(function, part),
            entering.shape,
            size=float(entering.square().mean().sqrt()),
            positive=bool((entering >= 0).all()),
        )
        for function, part, entering in zip(functions, parts, maps, strict=False)
    ]


_STEP = 0.2  # step size of Adam, in units of the root mean square of what goes into a stage
_PEELING_END = 0.002  # step size at the end, over that of the beginning
_START = 0.5  # size of random inputs to start at, over that of random images' maps


@final
class StagePeeling:
    """Recovers the inputs of the last stage, then of the one before, down to the second."""

    def __init__(
        self, staged: StagedBody, target: StageTarget, rng: torch.Generator, *, steps: int
    ) -> None:
        """Begins with the last stage.

        Args:
            staged: The victim's body, with an update of one gradient.
            target: Outputs of the last stage, the features, and their error signals.
            rng: Source of the inputs that each stage starts at, on the CPU.
            steps: Number of steps of Adam for each stage.
        """
        self._rng, self._staged = rng, staged
        self._steps, self._target = steps, target
        self.unexplained = math.inf
        """Least loss of the stage peeled last, relative; infinite before one is peeled."""
        self.maps: list[Tensor] = []
        """Inputs (N, ...) of each of the stages peeled so far, in the order of the stages."""
        self._losses = self._peel()

    def step(self) -> Tensor:
        """Takes a step of Adam for each stage to peel; returns the loss (0-d) of the last one."""
        losses = [next(self._losses) for _ in self._staged.stages[1:]]
        return losses[-1]

    def images(self, *, weight: float, calls: int) -> PartGradient:
        """Returns the first stage's problem once others are peeled; outputs count by `weight`."""
        self._staged.narrow(0)
        return self._problem(self._staged.stages[0], weight, calls)

    def _problem(self, stage: _Stage, weight: float, calls: int) -> PartGradient:
        body, target = self._staged.body, self._target
        return PartGradient(body, stage.part, target, weight=weight, calls=calls)

    def _peel(self) -> Iterator[Tensor]:
        """Yields the loss (0-d) of each step of each stage, from the last to the second."""
        for stage in reversed(self._staged.stages[1:]):
            problem = self._problem(stage, 1.0, self._steps)
            # Maps of random images are too much alike to start from.
            start = _START * stage.size * torch.randn(stage.shape, generator=self._rng)
            inputs = (start.abs() if stage.positive else start).to(self._target.outputs.device)
            adam = Adam([inputs], betas=(0.9, 0.99))
            best, best_loss = inputs.clone(), inputs.new_full((), torch.inf)
            for step in range(self._steps):
                done = step / self._steps
                self._staged.narrow(done)
                misfit = problem(inputs)
                better = misfit.loss < best_loss
                best_loss = torch.where(better, misfit.loss, best_loss)
                best = torch.where(better, inputs, best)
                # Adam's steps are as large as its rate: in units of the inputs they suit all.
                rate = _STEP * stage.size * half_cosine(done, _PEELING_END)
                adam.step([misfit.slope], rate)
                if stage.positive:
                    inputs.clamp_(min=0)
                if step + 1 == self._steps:
                    # These inputs are the outputs of the stage before, with errors of their own.
                    self._target, self.unexplained = problem.pull_back(best), float(best_loss)
                    self.maps.insert(0, self._target.outputs)
                yield misfit.loss


_SHARE = 0.2
"""First step size of a map, over its distance from what the stage before makes of its inputs."""
_RELAXATION_END = 0.005  # step size at the end, over that of the beginning
_LOOSE = 0.03
"""Weight of maps' relative squared distance at first, in shares of the update's energy."""
_TIGHT = 100.0
"""The same at the end, without noise: tighter maps carry the noise of all stages into the
images."""
_TIGHT_APPROXIMATE = 10.0  # the same where an update of several steps is taken for one gradient
_FAR, _CLEAR = 1.5, 3.0
"""Assumed relative error of unknown maps: at most `_FAR`, and `_CLEAR` times the fourth root of the
share that is not noise. Where noise hides most of the update, steps are to be shorter."""
LEAST_CLEAR = 1e-3
"""Share of the update that is not noise, at least: less cannot be told from none."""


@final
class Relaxation:
    """The misfit of images together with the maps between stages, which every call updates."""

    def __init__(
        self,
        staged: StagedBody,
        target: StageTarget,
        images: Tensor,
        maps: Sequence[Tensor],
        *,
        noise: float,
        later: LaterSteps | None,
        steps: int,
    ) -> None:
        """Prepares the descent.

        Args:
            staged: The victim's body, with an update that is taken for one gradient.
            target: Outputs of the last stage, the features, and their error signals.
            images: Normalized images (N, C, H, W) to start from.
            maps: Inputs of all other stages to start from, up to a factor for each image; those of
                `images` if empty.
            noise: Share of |update|² that is noise.
            later: What later steps add; None for an update of one step.
            steps: Number of calls to come.
        """
        clear = max(1 - noise, LEAST_CLEAR)
        self.final_weight = (_TIGHT if later is None else _TIGHT_APPROXIMATE) * math.sqrt(clear)
        """Weight of maps' relative squared distance at the end, in each step's loss as well."""
        self._staged, self._target = staged, target
        self._later = later
        self._updates = [
            PartUpdate(staged.body, stage.part, target.scale, approximate=later is not None)
            for stage in staged.stages
        ]
        self._energy = nonzero_energy(torch.stack([each.energy for each in self._updates]).sum())
        self._done, self._steps = 0, steps
        # A tape would go on as before a correction.
        taped_calls = steps if later is None else 0
        self._slopes = tape_if_it_pays(self._differentiate, taped_calls, target.outputs.device)
        self.maps, distances = self._initial_maps(images, maps, min(_FAR, _CLEAR * clear**0.25))
        self.step_size = _SHARE * distances[0]
        """Step size of images at first, in units of normalized pixels."""
        self._sizes = [
            _SHARE * unknown_distance * stage.size
            for unknown_distance, stage in zip(distances, staged.stages[1:], strict=True)
        ]
        self._adam = torch.optim.Adam([{"params": [each]} for each in self.maps], betas=(0.9, 0.99))

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates normalized `images` and the distance of all maps; takes a step over these."""
        done = self._done / self._steps
        self._staged.narrow(done)
        corrected = self._later is not None and self._later.correct(self._updates, images)
        # Geometric, so that each part of the descent tightens maps by one factor.
        weight = images.new_tensor(_LOOSE * (self.final_weight / _LOOSE) ** done)
        update, distance, slope, *slopes = self._slopes(
            weight, images, *(each.detach() for each in self.maps)
        )
        residuals = half_cosine(done, _RELAXATION_END)
        for each, of, group, size in zip(
            self.maps, slopes, self._adam.param_groups, self._sizes, strict=True
        ):
            each.grad = of
            # Each map has a step of its own, by how far it is from what the stage before makes.
            group["lr"] = size * residuals
        self._adam.step()
        for each, stage in zip(self.maps, self._staged.stages[1:], strict=True):
            if stage.positive:
                each.detach().clamp_(min=0)
        self._done += 1
        return Misfit(update, distance, self.final_weight, slope, target_changed=corrected)

    def _differentiate(self, weight: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Computes both misfits (0-d), and the slopes of update + `weight` distance in `inputs`."""
        images, *maps = inputs
        variables = [lay_out(images), *(each.detach().clone() for each in maps)]
        for each in variables:
            each.requires_grad_()
        with torch.enable_grad():
            update, distance = self._misfits(variables)
            slopes = torch.autograd.grad(update + weight * distance, variables)
        return update.detach(), distance.detach(), *(each.contiguous() for each in slopes)

    def _initial_maps(
        self, images: Tensor, maps: Sequence[Tensor], unknown_distance: float
    ) -> tuple[list[Tensor], list[float]]:
        """Prepares maps to start from, and how far each is from what the stage before makes."""
        if not maps:
            between = [each.clone() for each in self._staged.maps(images)[1:-1]]
            distances = [unknown_distance] * len(between)
            return [each.requires_grad_() for each in between], distances
        entering, initial, distances = images, [], []
        for stage, each in zip(self._staged.stages, maps, strict=False):
            with torch.no_grad():
                outputs_made = stage.part.function(entering)
            # Peeling leaves a map a factor for each image, which the stage before tells.
            along = (outputs_made * each).flatten(1).sum(1) / each.flatten(1).square().sum(1)
            entering = each * along.view(-1, *[1] * (each.ndim - 1))
            initial.append(entering.clone().requires_grad_())
            distances.append(float(_distance(outputs_made, entering).sqrt()))
        return initial, distances

    def _misfits(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Computes the misfits of the update and of what stages make of their `inputs` (0-d)."""
        outputs, errors = self._target.outputs, self._target.errors
        residuals: list[Tensor] = []
        distances: list[Tensor] = []
        for i, stage in reversed(list(enumerate(self._staged.stages))):
            # The accelerated layers compute no gradient of a leaf.
            entering = inputs[i].clone() if i else inputs[i]
            outputs_made = stage.part.function(entering)
            parameters = [parameter for _, parameter in stage.part.parameters]
            # Differentiable, as a stage's error signals depend on the maps of all stages behind it.
            gradient = torch.autograd.grad(
                (outputs_made.flatten(1) * errors.flatten(1)).sum(),
                [*parameters, entering] if i else parameters,
                create_graph=True,
            )
            residuals += self._updates[i].compare(gradient[: len(parameters)])[0]
            distances.append(_distance(outputs_made, outputs))
            # Chain rule: the error signals of what enters this stage are the next target's.
            outputs, errors = entering, gradient[-1]
        update = torch.stack([each.square().sum() for each in residuals]).sum() / self._energy
        return update, torch.stack(distances).sum()


def _distance(outputs_made: Tensor, outputs: Tensor) -> Tensor:
    outputs_made, outputs = outputs_made.flatten(1), outputs.flatten(1)
    least = torch.finfo(outputs_made.dtype).tiny
    return (
        (outputs_made - outputs).square().sum(1) / outputs.detach().square().sum(1).clamp_min(least)
    ).mean()
