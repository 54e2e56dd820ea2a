"""The whole update, recomputed from candidates: its direction, or all that its steps make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from fedsim.contracts.grant import Knowledge
from fedsim.types import Observation
from fedsim_attacks.gradient_matching._distances import (
    Distance,
    Target,
    cosine_distance,
    reweighted_cosine,
)
from fedsim_attacks.gradient_matching._forward_prior import Features, ForwardPrior
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features._body_gradient import Misfit
from fedsim_attacks.images_from_features._signals import Signals


def distance_by_part(names: Sequence[str], *, clipped: bool = False) -> Distance:
    """Makes a distance: the sum over body and head of |u - t|² / |t|².

    The head's planted neurons would outweigh all else in one. `clipped` updates t have been scaled
    by the client: of c u, for the c that fits best.
    """
    body = [name.startswith("body.") for name in names]

    def distance(update: Sequence[Tensor], target: Target) -> tuple[Tensor, list[Tensor], Tensor]:
        unit = {part: _energy(target.tensors, body, part) for part in (True, False)}
        units = [unit[part] for part in body]
        factor = update[0].new_ones(())
        if clipped:
            own = [u.square().sum() / unit for u, unit in zip(update, units, strict=True)]
            across = [
                (u * t).sum() / unit
                for u, t, unit in zip(update, target.tensors, units, strict=True)
            ]
            factor = torch.stack(across).sum() / torch.stack(own).sum()
        residuals = [factor * u - t for u, t in zip(update, target.tensors, strict=True)]
        loss = sum(_energy(residuals, body, part) / unit[part] for part in (True, False))
        # At the best factor the loss does not change with it.
        direction = [each / unit for each, unit in zip(residuals, units, strict=True)]
        return torch.as_tensor(loss), direction, 2 * factor

    return distance


def _energy(tensors: Sequence[Tensor], body: Sequence[bool], part: bool) -> Tensor:
    chosen = [each.square().sum() for each, of in zip(tensors, body, strict=True) if of == part]
    whole = torch.stack(chosen).sum() if chosen else tensors[0].new_zeros(())
    return whole.clamp_min(torch.finfo(tensors[0].dtype).tiny)


@final
class UnrolledUpdate:
    """The observed update, and its recomputation from candidates by the client's own steps."""

    def __init__(
        self,
        observation: Observation,
        features: Tensor,
        known: Signals,
        *,
        weight: float,
        width: float,
        calls: int,
    ) -> None:
        """Prepares the comparison; arguments are as of `BodyGradient`."""
        self._distance = distance_by_part(
            list(observation.parameters), clipped=observation.effect.scaled
        )
        self._matching = Matching(observation, calls=calls, width=width)
        self._labels, self._weight = known.labels, weight
        self._prior = ForwardPrior(observation, Knowledge(), Features(features, "relative"))

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates the misfit at normalized `images` (N, C, H, W)."""
        candidate = self._matching.candidate(images, self._labels, None)
        loss, (slope,) = self._matching.differentiate(candidate, self._distance)
        distance_of_features, pull = self._prior(images)
        return Misfit(loss, distance_of_features, slope + self._weight * pull)


@final
class WholeGradient:
    """The direction of the observed update, against its recomputation from candidate images.

    Where no features are known 1 - the cosine of both. Candidates that are held to features are
    compared tensor by tensor, of which few would outweigh all others in a trained network.
    """

    def __init__(
        self,
        observation: Observation,
        labels: Tensor,
        *,
        width: float,
        calls: int,
        features: Tensor | None = None,
        weight: float = 0.0,
    ) -> None:
        """Prepares the comparison for images of `labels` (N,).

        Args:
            observation: what the server saw, as one gradient.
            labels: of the images.
            width: of the jumps of slopes (`smooth_slopes`); 0 leaves them as they are.
            calls: how often it is to be evaluated.
            features: (N, d), that the images are to have; None if nothing is known of them.
            weight: of the misfit of features.
        """
        self._matching = Matching(observation, calls=calls, width=width)
        self._labels, self._weight = labels, weight
        wanted = None if features is None else Features(features, "relative")
        self._prior = ForwardPrior(observation, Knowledge(), wanted)
        self._distance: Distance = cosine_distance
        if features is not None:
            self._distance = reweighted_cosine(self._matching.counts)

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates the misfit at normalized `images` (N, C, H, W)."""
        candidate = self._matching.candidate(images, self._labels, None)
        loss, (slope,) = self._matching.differentiate(candidate, self._distance)
        distance_of_features, pull = self._prior(images)
        return Misfit(loss, distance_of_features, slope + self._weight * pull)
