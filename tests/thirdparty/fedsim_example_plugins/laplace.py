"""A mechanism of a third party: Laplace noise that is not truncated, on one number."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.privacy.contract import Answer, Calibration, Curve, Experiment, KnownMechanism

Size = Annotated[float, Field(ge=1e-12, le=1e12)]


class LaplaceCurve(Curve):
    """δ(ε) of a given noise."""

    sensitivity: Size
    """Distance between the numbers of two neighbours, in the units of the release."""
    scale: Size
    """b of the density exp(-|x| / b), in the units of the release."""

    def neighbours(self) -> str:
        """See `Stated`."""
        return f"at most {self.sensitivity:g} apart"

    def delta(self, epsilon: float) -> Answer:
        """δ = 1 - exp((ε - Δ/b) / 2), or 0 from ε = Δ/b on."""
        delta = -math.expm1(min(epsilon - self.sensitivity / self.scale, 0.0) / 2)
        return self._answer(epsilon, delta)

    def epsilon(self, delta: float) -> Answer:
        """The inverse."""
        most = self.sensitivity / self.scale
        return self._answer(max(0.0, most + 2 * math.log1p(-delta)), delta)

    def _answer(self, epsilon: float, delta: float) -> Answer:
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=math.log(delta) if delta else -math.inf,
            method="closed form",
            direction="both",
            scale=self.scale,
        )


class LaplaceCalibration(Calibration):
    """The least scale of the noise."""

    sensitivity: Size
    """Distance between the numbers of two neighbours, in the units of the release."""

    def neighbours(self) -> str:
        """See `Stated`."""
        return f"at most {self.sensitivity:g} apart"

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        """The scale at which δ(ε) is `delta`."""
        scale = self.sensitivity / (epsilon - 2 * math.log1p(-delta))
        return LaplaceCurve(sensitivity=self.sensitivity, scale=scale).delta(epsilon)


class LaplaceExperiment(Experiment):
    """A number that the row moves by `sensitivity`, behind Laplace noise."""

    claims = LaplaceCurve
    sensitivity: Size
    scale: Size

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """(draws,) log likelihood ratios."""
        scale, gap = self.sabotage * self.scale, self.sensitivity
        seen = gap * present + rng.laplace(scale=scale, size=draws)
        ratios: NDArray[np.float64] = np.clip(2 * seen - gap, -gap, gap) / scale
        return ratios


class Laplace(KnownMechanism):
    """Laplace noise on one number."""

    curve = LaplaceCurve
    calibration = LaplaceCalibration
    experiment = LaplaceExperiment
