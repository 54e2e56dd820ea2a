"""Places labels beside points so that they cover neither each other nor what is plotted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An upright rectangle, in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Returns the area shared with `other`, in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    @property
    def area(self) -> float:
        """Area in square pixels."""
        return (self.right - self.left) * (self.top - self.bottom)


_DIRECTIONS = [i * math.pi / 8 for i in range(16)]
_DISTANCES = (9.0, 15.0, 24.0, 36.0, 52.0, 72.0, 96.0, 130.0, 170.0)


def place(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    bounds: Box,
) -> list[Box]:
    """Returns a box of each of `sizes` (width, height) near its anchor (x, y), inside `bounds`.

    Greedy, in the given order: each label takes the place that covers least of the labels before
    it, then least of the obstacles, then is nearest to its anchor.

    Args:
        anchors: (x, y) of each point.
        sizes: (width, height) of each label.
        obstacles: what is plotted.
        bounds: that no label should leave.
    """
    placed: list[Box] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        candidates = [
            (_at(anchor, size, distance, direction), distance)
            for distance in _DISTANCES
            for direction in _DIRECTIONS
        ]

        def cost(candidate: tuple[Box, float]) -> tuple[float, float, float]:
            box, distance = candidate
            outside = box.area - box.overlap(bounds)
            covered = sum(box.overlap(other) for other in placed)
            # Three pixels of obstacle weigh as much as one of distance.
            return (
                round(outside + covered, 6),
                sum(box.overlap(obstacle) for obstacle in obstacles) / 3 + distance,
                distance,
            )

        placed.append(min(candidates, key=cost)[0])
    return placed


def _at(
    anchor: tuple[float, float], size: tuple[float, float], distance: float, direction: float
) -> Box:
    """Returns the box whose nearest edge is `distance` away from `anchor` in `direction`."""
    dx, dy = math.cos(direction), math.sin(direction)
    width, height = size
    x = anchor[0] + dx * (distance + width / 2 * abs(dx))
    y = anchor[1] + dy * (distance + height / 2 * abs(dy))
    # Sideways labels are pushed out by half their width so that they start beside the anchor.
    x += dx * width / 2 * (1 - abs(dx))
    y += dy * height / 2 * (1 - abs(dy))
    return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
