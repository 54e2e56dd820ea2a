"""Training on a changed batch: what the defenses have in common that change images and labels."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from fedsim.contracts.defense import GradientFn, LocalStep, TrainingDefense
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, FedsimError, InputSpec, LocalTraining, Tensors


class BatchDefense(TrainingDefense):
    """Base of defenses that change the batch of each local step; labels become probabilities.

    The truth stays the client's own images. A defense behind one that computes the step from the
    loss itself, as `dp_sgd` does, gets the batch unchanged: put that one first.
    """

    @abstractmethod
    def change(
        self, images: Tensor, labels: Tensor, spec: InputSpec, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns the changed batch: inputs (M, C, H, W) and probabilities (M, K).

        Args:
            images: normalized images (B, C, H, W), B > 0, which stay as they are.
            labels: (B, K) probabilities of their classes.
            spec: says how images are normalized.
            rng: only source of randomness, on the CPU; images may be on a GPU.
        """

    @abstractmethod
    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect whose `batch` describes what `change` does."""

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function of the changed batch's direction; an empty batch is not changed.

        It raises a FedsimError on rows of a table.
        """

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            # `change` is promised at least one image.
            if not len(images):
                return step.gradient(parameters, images, labels, rng)
            if images.ndim != 4:
                raise FedsimError(
                    f"{type(self).__name__} changes images, and these are rows of a table; drop it"
                )
            soft = labels
            if labels.ndim == 1:
                soft = F.one_hot(labels, step.spec.num_classes).to(images.dtype)
            inputs, targets = self.change(images, soft, step.spec, rng)
            found = step.gradient(parameters, inputs, targets, rng)
            # Sums are divided by the number of images, of which each may have several inputs.
            share = len(images) / len(inputs)
            return found if share == 1 else {n: share * each for n, each in found.items()}

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns `before`, or no proof if it has a mechanism: an image is in several inputs."""
        if before.mechanism:
            return Guarantee(reason="an example's image is in several inputs that are clipped")
        return before
