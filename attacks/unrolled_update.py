"""The update of several local steps or clients, for known labels and first features."""

from __future__ import annotations

from typing import final

from torch import Tensor

from fedsim.types import Knowledge, Observation
from fedsim_attacks.body_gradient import Misfit, Signals
from fedsim_attacks.forward_prior import Features, ForwardPrior
from fedsim_attacks.matching import Matching, squared_distance


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
        """As `BodyGradient`."""
        self._matching = Matching(observation, calls=calls, width=width)
        self._labels, self._weight = known.labels, weight
        self._prior = ForwardPrior(observation, Knowledge(), Features(features, "relative"))

    def __call__(self, images: Tensor) -> Misfit:
        """At normalized `images` (N, C, H, W)."""
        candidate = self._matching.candidate(images, self._labels, None)
        loss, (slope,) = self._matching.differentiate(candidate, squared_distance)
        away, pull = self._prior(images)
        return Misfit(loss, away, slope + self._weight * pull)
