"""The direction of the whole update, with slopes smoothed: nothing but labels need be known."""

from __future__ import annotations

from typing import final

from torch import Tensor

from fedsim.types import Observation
from fedsim_attacks.gradient_matching._distances import cosine_distance
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features._body_gradient import Misfit


@final
class WholeGradient:
    """1 - the cosine of the observed update and its recomputation from candidate images."""

    def __init__(
        self, observation: Observation, labels: Tensor, *, width: float, calls: int
    ) -> None:
        """Prepares the comparison for `labels` (N,); `width` and `calls` as for `BodyGradient`."""
        self._matching = Matching(observation, calls=calls, width=width)
        self._labels = labels

    def __call__(self, images: Tensor) -> Misfit:
        """Evaluates the misfit at normalized `images` (N, C, H, W), without features."""
        candidate = self._matching.candidate(images, self._labels, None)
        loss, (slope,) = self._matching.differentiate(candidate, cosine_distance)
        return Misfit(loss, loss.new_zeros(()), slope)
