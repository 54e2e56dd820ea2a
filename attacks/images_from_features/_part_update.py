"""The observed update of a part of the body, and how a recomputed one is compared with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.images_from_features._body import Body, Part, relaid

_LEAST_SHARE = 0.02
"""Of one step's gradient in an update of several."""


class _Expected(NamedTuple):
    """What a recomputed gradient is turned into before it is compared."""

    scaled: bool
    """Whether it is multiplied by the factor that fits best."""
    share: float = 1.0
    """The share of the gradient that is in the update."""
    added: list[Tensor] | None = None
    """What later steps have added."""


@final
class PartUpdate:
    """The observed update of a part of the body."""

    def __init__(
        self,
        observation: Observation,
        body: Body,
        part: Part,
        scale: Tensor,
        *,
        approximate: bool = False,
    ) -> None:
        """Prepares the update of a part for comparison.

        Args:
            observation: what the server saw.
            body: whose part it is.
            part: layers and parameters.
            scale: that the client's defense has applied to its update.
            approximate: whether it is the update of several steps, compared with one gradient:
                with as much of it as fits best, until `correct` says how much there is.
        """
        update = {name: observation.update[name] / scale for name, _ in part.parameters}
        self._target = [
            relaid(body.without_padding(name, tensor)) for name, tensor in update.items()
        ]
        self._bounds = _bounds(observation, update)
        self._names = list(update)
        self._clipped = observation.effect.scaled
        self._expected = _Expected(scaled=approximate)
        self.energy = torch.stack([tensor.square().sum() for tensor in self._target]).sum()
        """|update|² (0-d), of the entries that meet anything but padding."""

    def correct(self, share: float, added: Mapping[str, Tensor]) -> None:
        """Takes in that the update is a `share` of the gradient and `added` (`LaterSteps`)."""
        rest = [relaid(added[name]) for name in self._names]
        self._expected = _Expected(self._clipped, share, rest)

    def compared(self, update: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | float]:
        """Subtracts this update from a recomputed one, or for a removed entry its bound.

        Also returns the derivative of that in the recomputed update: 1, but for several steps'.
        """
        expected = self._expected
        growth: Tensor | float = expected.share
        if expected.added is not None:
            update = [growth * u + a for u, a in zip(update, expected.added, strict=True)]
        if expected.scaled:
            factor = self._factor(update)
            growth, update = growth * factor, [factor * tensor for tensor in update]
        return [self._subtracted(i, tensor) for i, tensor in enumerate(update)], growth

    def _factor(self, update: Sequence[Tensor]) -> Tensor:
        """Computes the factor of the best fit (0-d), where the misfit does not depend on it."""
        with torch.no_grad():
            pairs = list(zip(update, self._target, strict=True))
            across = torch.stack([(u * t).sum() for u, t in pairs]).sum()
            compared_entries = [u if self._bounds is None else u * (t != 0) for u, t in pairs]
            own = torch.stack([u.square().sum() for u in compared_entries]).sum()
            return (across / own.clamp_min(torch.finfo(own.dtype).tiny)).clamp_min(_LEAST_SHARE)

    def _subtracted(self, index: int, update: Tensor) -> Tensor:
        target = self._target[index]
        difference = update - target
        if self._bounds is None:
            return difference
        bound = self._bounds[index]
        over = update - update.clamp(-bound, bound)
        return torch.where(target == 0, over, difference)


def _bounds(observation: Observation, update: dict[str, Tensor]) -> list[Tensor] | None:
    """Bounds the removed entries of each tensor; None if none was removed."""
    removed = observation.effect.removed
    if removed is None or observation.effect.noisy:
        return None
    if removed == "others":
        return [tensor.new_full((), torch.inf) for tensor in update.values()]
    kept = [tensor[tensor != 0].abs() for tensor in update.values()]
    least = [part.min() if len(part) else part.new_full((), torch.inf) for part in kept]
    if removed == "smallest_of_tensor":
        return least
    return [torch.stack(least).min()] * len(least)


def nonzero_energy(energy: Tensor) -> Tensor:
    """Returns `energy` (0-d); 1 if nothing is left of an update, whose misfit then is 0."""
    return torch.where(energy > 0, energy, 1.0)
