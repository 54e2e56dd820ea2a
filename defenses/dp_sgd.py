"""DP-SGD of Abadi et al. 2016: per-example clipping, then noise on every local step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, final

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from fedsim.contracts.defense import (
    AskedEpsilon,
    GradientFn,
    LocalStep,
    TrainingDefense,
    add_gaussian,
)
from fedsim.contracts.guarantee import Guarantee
from fedsim.types import Effect, FedsimError, LocalTraining, Tensors
from fedsim_defenses.per_example import clipped_mean, in_types_of, noise_on_steps, noisy_steps


@final
class DPSGD(TrainingDefense):
    """Clips each example's gradient to `norm`, takes the mean, adds N(0, (z norm / B)^2).

    z is `noise_multiplier` and B the batch size (its mean, where it varies; an empty batch releases
    noise alone). An example whose gradient is not finite counts as zero. It replaces the gradient
    of training defenses before it. One example is hidden, against any other in its place or, where
    batches are drawn by `poisson` or `balls_in_bins`, against none; how often it is released
    follows from the local training. Local steps on the `same` batch are accounted without
    amplification by sampling.

    Examples must not see each other: a step through batch norm in train mode raises a FedsimError.
    """

    from_loss: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1"
    )

    norm: Annotated[float, Field(ge=1e-12, le=1e12)]
    """Bound C on an example's gradient, all tensors together."""
    noise_multiplier: Annotated[float, Field(ge=0, le=1e12)] | None = None
    """z: standard deviation of the noise on the sum of clipped gradients, over C. Give either it or
    `epsilon`."""
    epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The ε of the client that is worst off, after all rounds and probes: z is then the least by
    which the ledger states no more."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """δ of `epsilon`; default: `privacy.delta`, and no other than that."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError(
                "neither noise_multiplier nor epsilon is given; add the noise, or the ε that it is "
                "to be found for (epsilon: 8)"
            )
        if self.noise_multiplier is not None and self.epsilon is not None:
            raise ValueError(
                "both noise_multiplier and epsilon are given, and one follows from the other; "
                "remove one"
            )
        if self.delta is not None and self.epsilon is None:
            raise ValueError("delta belongs to epsilon; remove it, or give epsilon")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        return {key: value for key, value in written.items() if value is not None}

    @property
    def target(self) -> AskedEpsilon | None:
        """The `epsilon` that noise has to be found for; None if only the noise is given."""
        return AskedEpsilon(epsilon=self.epsilon, delta=self.delta) if self.epsilon else None

    def with_noise(self, multiplier: float) -> DPSGD:
        """Returns a copy with `multiplier` as `noise_multiplier`, and the same `target`."""
        return self.model_copy(update={"noise_multiplier": multiplier})

    def gradient(self, step: LocalStep) -> GradientFn:
        """Returns the function of the noisy clipped mean; FedsimError until the noise is found."""
        multiplier = self.noise_multiplier
        if multiplier is None:
            raise FedsimError(
                "dp_sgd: the noise for its epsilon is found for a federation (a `Workload` does); "
                "give noise_multiplier elsewhere"
            )

        def direction(
            parameters: Tensors, images: Tensor, labels: Tensor, rng: torch.Generator
        ) -> Tensors:
            mean = clipped_mean(step.loss, parameters, images, labels, self.norm, step.batch_size)
            noisy = add_gaussian(mean, multiplier * self.norm / step.batch_size, rng)
            return in_types_of(parameters, noisy)

        return direction

    def guarantee(self, before: Guarantee, training: LocalTraining) -> Guarantee:
        """Returns a Gaussian mechanism for each local step; none if `noise_multiplier` is 0."""
        return noisy_steps("dp_sgd", self._noise, training)

    def effect(self, training: LocalTraining) -> Effect:
        """Returns an Effect of `scaled_examples`, and of noise on each step unless that is 0."""
        std = self._noise * self.norm / training.batch_size
        return noise_on_steps(std)

    @property
    def _noise(self) -> float:
        return _UNKNOWN_NOISE if self.noise_multiplier is None else self.noise_multiplier


_UNKNOWN_NOISE = 1e-300
"""Multiplier that stands for noise still to be found: so little that nothing is claimed of it."""
