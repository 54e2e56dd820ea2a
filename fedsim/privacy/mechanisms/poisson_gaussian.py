"""The calculator's mechanism `poisson_gaussian`: DP-SGD with Poisson sampling, to be audited."""

from __future__ import annotations

from typing import Annotated, final

import numpy as np
from pydantic import Field

from fedsim.privacy.contract import Curve, Experiment, KnownMechanism
from fedsim.privacy.mechanisms.correlated_gaussian import CorrelatedCurve
from fedsim.privacy.numerics.special import Array


@final
class PoissonGaussianExperiment(Experiment):
    """Steps of DP-SGD on Poisson samples, of one example whose gradient has norm 1."""

    steps: Annotated[int, Field(ge=1, le=10_000)]
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1e12)]
    """Standard deviation of a step's noise over the bound of one row's contribution."""

    def curve(self) -> Curve:
        """Returns the calculator's curve of Poisson-sampled steps without correlation."""
        return CorrelatedCurve(
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            sampling="poisson",
            noise_multiplier=self.noise_multiplier,
        )

    def work(self) -> int:
        """Returns the number of steps, each of which draws one number for a release."""
        return self.steps

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        """Draws releases; returns their (draws,) log likelihood ratios, summed over the steps."""
        sigma = self.sabotage * self.noise_multiplier
        total = np.zeros(draws)
        for _ in range(self.steps):
            seen = sigma * rng.standard_normal(draws)
            if present:
                seen += rng.random(draws) < self.sampling_rate
            # log(1 - q + q exp((x - 1/2) / σ²)), in the form that keeps its digits for small q.
            total += np.log1p(self.sampling_rate * np.expm1((seen - 0.5) / sigma**2))
        return total


class KnownPoissonGaussian(KnownMechanism):
    """DP-SGD's steps with Poisson sampling: each takes the row with probability `sampling_rate`."""

    experiment = PoissonGaussianExperiment
