"""DP-SGD of Abadi et al. 2016: per-example clipping, then noise on every local step."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import GradientFn, LossFn, TrainingDefense, add_gaussian
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, LocalTraining, Tensors
from fedsim_defenses.per_example import clipped_mean, in_types_of, noise_on_steps, noisy_steps


@final
class DPSGD(TrainingDefense):
    """Clips each example's gradient to `norm`, takes the mean, adds N(0, (z norm / B)^2).

    z is `noise_multiplier` and B the batch size (its mean, where it varies; an empty batch releases
    noise alone). An example whose gradient is not finite counts as zero. It replaces the gradient
    of training defenses before it. One example is hidden, against any other in its place or, where
    batches are drawn by `poisson` or `balls_in_bins`, against none; how often it is released
    follows from the local training. Local steps on
    the `same` batch are accounted without amplification by sampling.

    Examples must not see each other: batch norm in train mode is refused.
    """

    paper: ClassVar[str] = (
        "Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1"
    )

    norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """Bound C on an example's gradient, all tensors together."""
    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)]
    """z: standard deviation of the noise on the sum of clipped gradients, over C."""

    def gradient(self, loss: LossFn, gradient: GradientFn, batch_size: int) -> GradientFn:
        """The noisy mean of clipped gradients of the examples' own losses.

        Raises:
            FedsimError: (when called) the loss cannot be taken one example at a time.
        """

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            mean = clipped_mean(loss, parameters, images, labels, self.norm, batch_size)
            noisy = add_gaussian(mean, self.noise_multiplier * self.norm / batch_size, rng)
            return in_types_of(parameters, noisy)

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """A Gaussian mechanism per local step, whatever else the step does with its gradient."""
        return noisy_steps("dp_sgd", self.noise_multiplier, training)

    def effect(self, training: LocalTraining) -> Effect:
        """Noise on each step, behind a factor of each example's own."""
        std = self.noise_multiplier * self.norm / training.batch_size
        return noise_on_steps(std)
