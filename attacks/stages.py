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
from torch import nn

from fedsim_attacks.body_gradient import Body, Part

_MARGIN = 2.0
"""Equations for each unknown number of a stage that is inverted on its own."""
_KNOWN = 0.5
"""Share of a map's values that are equations: ReLU has set the others to zero."""


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


def stages(body: Body, num_images: int, rng: torch.Generator) -> list[Stage]:
    """From images to features; one only where nothing between is determined.

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
    """What cannot be cut: everything but a plain sequence."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _units(child)
    else:
        yield module
