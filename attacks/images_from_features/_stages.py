"""A network's body in stages, each of which its own gradient determines.

Between its layers a body computes maps. Of a stretch of layers whose outputs and error signals are
known for every image, the gradient of its parameters and the outputs themselves are equations for
the maps that went in. Where they are enough, the stretch can be inverted on its own: a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from fedsim.rng import generator
from fedsim.types import Observation
from fedsim_attacks.images_from_features._body import Body, Part
from fedsim_attacks.images_from_features._calls import BodyCalls

_MARGIN = 2.0
"""Equations for each unknown number of a stage that is inverted on its own."""
_KNOWN = 0.5
"""Share of a map's values that are equations: ReLU has set the others to zero."""
_NARROWEST = 0.1
"""How wide jumps are at the end, over the beginning."""


@final
@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a body, and what is known of what goes into them."""

    part: Part
    shape: torch.Size
    """(N, ...) of what goes into it."""
    size: float
    """Root mean square of that, for random images."""
    positive: bool
    """Whether it is never negative, as behind ReLU."""


@final
class StagedBody:
    """A victim's body in stages, and how wide its jumps are taken for."""

    def __init__(
        self, observation: Observation, num_images: int, rng: torch.Generator, *, width: float
    ) -> None:
        """Cuts the body into stages; `width` is as for `Body`, at first."""
        self._full = width
        device = next(iter(observation.parameters.values())).device
        self._width = torch.tensor(float(width), device=device)
        self.body = Body(observation, self._width)
        self.stages = stages(self.body, num_images, rng)

    def narrow(self, done: float) -> None:
        """Narrows the jumps to what they are to be when a share `done` of a descent is done.

        Wide ones lead near; then, a few neurons are on the wrong side of theirs, by little.
        """
        self._width.fill_(self._full * _NARROWEST**done)

    @property
    def contrast_seen(self) -> float:
        """How much the first stage's outputs change, relatively, by 2 to 3 times the contrast.

        Of each image another: batch norm in train mode makes the same of one multiple of all.
        Behind group norm it is next to nothing, as norm layers add 1e-5 to a variance, or, if the
        layer before has a bias, a few hundredths; where nothing is normalized, more than 1.
        """
        stage = self.stages[0]
        images = torch.randn(stage.shape, generator=generator(0, "contrast"))
        images = images.to(next(self.body.model.parameters()).device)
        with torch.no_grad():
            factors = torch.linspace(2, 3, len(images)).to(images).view(-1, 1, 1, 1)
            one, two = stage.part.function(images), stage.part.function(factors * images)
        return float((two - one).norm() / one.norm())

    def maps(self, images: Tensor) -> list[Tensor]:
        """Computes the inputs (N, ...) of each stage and the outputs of the last, of `images`."""
        maps = [images]
        with torch.no_grad():
            for stage in self.stages:
                maps.append(stage.part.function(maps[-1]))
        return maps


def stages(body: Body, num_images: int, rng: torch.Generator) -> list[Stage]:
    """Cuts a body into stages from images to features; into one where none is determined.

    Or where stages put together do not make the body's features: something else is made of what
    comes out of its last layer, or its code takes another way for other images.
    """
    images = torch.randn(num_images, *body.input_shape, generator=rng)
    images = images.to(next(body.model.parameters()).device)
    every = body.parameters(body.model.body)
    calls = BodyCalls(body.model.body, -images)
    ends: list[int | None] = [None]
    parts: list[list[tuple[str, Tensor]]] = []
    for begin in reversed(calls.cuts({id(p) for _, p in every if p.ndim > 1})):
        used = calls.leaves(begin, ends[0])
        inside = [(name, p) for name, p in every if id(p) in used]
        equations = _KNOWN * calls.size(ends[0]) + sum(p.numel() for _, p in inside)
        if equations >= _MARGIN * calls.size(begin):
            ends.insert(0, begin)
            parts.insert(0, inside)
    taken = {name for part in parts for name, _ in part}
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
