"""What a client's later local steps add to the gradient of its first, simulated from candidates.

An update of several steps is taken for the one gradient that its first step makes, which is known
best: features, labels and error signals are those of the weights that were sent. The others add
something of the same size in another direction. But near the truth, the client's own training on
candidates adds much the same, and costs no more than an iteration: what is simulated is taken off
the update, candidates come nearer, and so on. At the true images nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from fedsim.models.local import mean_gradient_factor, step_weights
from fedsim.types import Observation
from fedsim_attacks.classifier_features._local_steps import as_one_gradient
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features._part_update import PartUpdate

_FROM, _TIMES = 0.4, 30
"""Share of the iterations after which candidates are near enough to tell what later steps add, and
how often it would be simulated over all of them."""


@final
class LaterSteps:
    """The mean gradient over a client's steps, less the share of it that the first step makes.

    Where each step has images of its own, less what they all make at the weights that were sent.
    """

    def __init__(self, observation: Observation, labels: Tensor) -> None:
        """Prepares the simulation for images of these `labels` (N,)."""
        training = observation.training
        weights = step_weights(training)
        self.share = weights[0] / sum(weights) if training.batches == "same" else 1.0
        """Of the first step's gradient in the mean gradient."""
        self._factor, self._labels = mean_gradient_factor(training), labels
        self._names = list(observation.parameters)
        self._all, self._one = Matching(observation), Matching(as_one_gradient(observation))

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Simulates normalized `images`: by parameter, the entries that meet more than padding."""
        images = images.detach()
        with torch.enable_grad():
            every = self._all.update(images, self._labels, create_graph=False)
            first = self._one.update(images, self._labels, create_graph=False)
        return {
            name: (self._factor * update - self.share * gradient).detach()
            for name, update, gradient in zip(self._names, every, first, strict=True)
        }

    def correct(self, updates: Iterable[PartUpdate], images: Tensor, done: int, calls: int) -> bool:
        """Corrects `updates` by what later steps add at these `images`, if it is time to.

        Returns whether it has: the training that is simulated of poor candidates may diverge.

        Args:
            updates: what is compared with one gradient.
            images: normalized candidates (N, C, H, W).
            done: calls of this before.
            calls: as many as there are to be.
        """
        if done < _FROM * calls or done % max(1, calls // _TIMES):
            return False
        added = self(images)
        if not all(bool(each.isfinite().all()) for each in added.values()):
            return False
        for update in updates:
            update.correct(self.share, added)
        return True
