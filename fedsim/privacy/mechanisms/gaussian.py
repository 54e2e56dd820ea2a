"""The calculator's mechanism `gaussian`: normal noise on a vector of bounded L2 sensitivity."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from fedsim.privacy.contract import (
    Answer,
    Calibration,
    Direction,
    ExactCurve,
    Experiment,
    KnownMechanism,
    PositiveSize,
    Sensitivity,
)
from fedsim.privacy.numerics import gaussian
from fedsim.privacy.numerics.special import Array


class _GaussianCurve(Sensitivity, ExactCurve):
    formula: ClassVar[str] = "closed form (Balle and Wang 2018, Theorem 8)"
    sigma: float = Field(ge=0, le=1e12)
    """Standard deviation of the noise, in the units of the release; 0 or at least 1e-12."""

    @model_validator(mode="after")
    def _some_noise(self) -> _GaussianCurve:
        if 0 < self.sigma < 1e-12:
            raise ValueError(f"sigma: expected 0 or >= 1e-12, got {self.sigma:g}")
        return self

    def log_deltas(self, epsilons: Array) -> dict[Direction, Array]:
        return {"both": gaussian.log_delta(self.sigma / self.sensitivity, epsilons)}

    def epsilons(self, delta: float) -> dict[Direction, float]:
        return {"both": float(gaussian.epsilon(self.sigma / self.sensitivity, delta))}

    def details(self) -> dict[str, float]:
        return {"sigma": self.sigma, "noise_multiplier": self.sigma / self.sensitivity}


class _GaussianCalibration(Sensitivity, Calibration):
    def calibrate(self, epsilon: float, delta: float) -> Answer:
        multiplier = float(gaussian.noise_multiplier(epsilon, delta))
        # What is found may lie beyond what may be asked.
        return _GaussianCurve.model_construct(
            sensitivity=self.sensitivity, sigma=multiplier * self.sensitivity
        ).delta(epsilon)


class _GaussianExperiment(Experiment):
    """A number that the row moves by `sensitivity`, behind Gaussian noise."""

    claims = _GaussianCurve
    gaussian_dp = True
    sensitivity: PositiveSize = 1.0
    """L2 distance that one row moves the release."""
    sigma: PositiveSize
    """Standard deviation of the noise, in the same units."""

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        sigma = self.sabotage * self.sigma
        moved = self.sensitivity * present + sigma * rng.standard_normal(draws)
        return self.sensitivity * (moved - self.sensitivity / 2) / sigma**2


class KnownGaussian(KnownMechanism):
    """Adds normal noise to a value: the Gaussian mechanism."""

    curve = _GaussianCurve
    calibration = _GaussianCalibration
    experiment = _GaussianExperiment
