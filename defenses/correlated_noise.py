"""DP-CGD: per-example clipping, and noise that takes back part of the step before's."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import torch
from pydantic import Field
from torch import Tensor

from fedsim.contracts.defense import (
    GradientFn,
    LocalStep,
    StatefulTrainingDefense,
    add_gaussian,
    add_noise,
    standard_normal,
)
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, LocalTraining, Tensors
from fedsim_defenses.per_example import clipped_mean, in_types_of, noise_on_steps, noisy_steps


@final
class CorrelatedNoise(StatefulTrainingDefense):
    """Clips each example's gradient to `norm`, takes the mean, adds (C / B) (z_t - λ z_(t-1)).

    C is `norm`, B the batch size (its mean, where it varies) and λ the `correlation`. z_t ~ N(0,
    z^2), with z the `noise_multiplier`. t counts the client's own steps, over local steps and
    rounds alike, and z_0 = 0. The noise of earlier steps partly cancels in the weights, and each
    release is more exposed: the ledger accounts all of a client's steps as one release
    (`fedsim.privacy.composition.correlated`). At λ = 0 it is dp_sgd, bit for bit. z_(t-1) is the
    client's own secret, and stays with it between rounds.

    It replaces the gradient of training defenses before it. A step through batch norm in train mode
    raises a FedsimError.
    """

    from_loss: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Kalinin et al., DP-CGD: Efficient Noise Correlation for Differentially Private Model "
        "Training, 2026; Population Risk Bounds for Kolmogorov-Arnold Networks Trained by DP-SGD "
        "with Correlated Noise, 2026, Algorithm 1 (without its projection, which acts on the "
        "server's weights)"
    )

    norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """Bound C on an example's gradient, all tensors together."""
    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)]
    """z: standard deviation of z_t on the sum of clipped gradients, over C."""
    correlation: Annotated[float, Field(ge=0, lt=1)]
    """λ: share of the last step's noise that is taken back."""

    def gradient_with_memory(self, step: LocalStep, memory: dict[str, Tensor]) -> GradientFn:
        """Returns the function of the noisy mean of clipped gradients.

        It keeps the standard normal draws of the last step in `memory`, by parameter, unless noise
        or correlation is 0.
        """

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            mean = clipped_mean(step.loss, parameters, images, labels, self.norm, step.batch_size)
            std = self.noise_multiplier * self.norm / step.batch_size
            # The same draws as dp_sgd's, and no memory.
            if self.correlation == 0 or std == 0:
                return in_types_of(parameters, add_gaussian(mean, std, rng))
            fresh = standard_normal(mean, rng)
            noise = dict(fresh)
            for name, last in memory.items():
                noise[name] = fresh[name] - self.correlation * last.to(fresh[name])
            # z_t itself is remembered, not the correlated noise that was added.
            memory.update(fresh)
            return in_types_of(parameters, add_noise(mean, std, noise))

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns the mechanism of all of a client's steps; none if `noise_multiplier` is 0."""
        return noisy_steps("correlated_noise", self.noise_multiplier, training, self.correlation)

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect of `scaled_examples`, and of noise on each step unless that is 0."""
        std = self.noise_multiplier * self.norm / training.batch_size
        return noise_on_steps(std, self.correlation)
