"""A network's body in stages, each of which its own gradient determines.

Between its layers a body computes maps. Of a stretch of layers whose outputs and error signals are
known for every image, the gradient of its parameters and the outputs themselves are equations for
the maps that went in. Where they are enough, the stretch can be inverted on its own: a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from fedsim.rng import generator
from fedsim.types import Observation
from fedsim_attacks.images_from_features._body import Body, Part

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

    Or where features are not what comes out of the body's last layer, but something made of it.
    """
    units = list(_units(body.model.body))
    images = torch.randn(num_images, *body.input_shape, generator=rng)
    maps = [images.to(next(body.model.parameters()).device)]
    with torch.no_grad():
        for unit in units:
            maps.append(unit(maps[-1]))
        whole = torch.allclose(body.model.features(maps[0]), maps[-1].flatten(1))
    parameters = [body.parameters(unit) for unit in units]
    found: list[Stage] = []
    end = len(units)
    for begin in reversed(range(len(units))):
        inside = [each for of in parameters[begin:end] for each in of]
        equations = _KNOWN * maps[end].numel() + sum(p.numel() for _, p in inside)
        determined = equations >= _MARGIN * maps[begin].numel()
        cut = whole and determined
        if not begin or (cut and any(p.ndim > 1 for _, p in parameters[begin])):
            function = nn.Sequential(*units[begin:end]) if whole else body.model.features
            part, entering = Part(function, inside), maps[begin]
            size, positive = float(entering.square().mean().sqrt()), bool((entering >= 0).all())
            found.append(Stage(part, entering.shape, size, positive))
            end = begin
    return found[::-1]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers that cannot be cut: everything but a plain sequence."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _units(child)
    else:
        yield module
