"""The calculator's mechanism `dp_sgd`: DP-SGD as people say it, by the ledger of runs."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsim.contracts.guarantee import of_steps
from fedsim.privacy import baselines
from fedsim.privacy.contract import Answer, Calibration, Curve, KnownMechanism, Stated
from fedsim.privacy.ledger import of_steps as epsilon_of_steps
from fedsim.privacy.numerics.special import least, least_noise
from fedsim.types import LocalTraining, Sampling
from fedsim.words import number_of

_SMALLEST = 700.0
"""-log of the smallest δ that is looked for."""


class _DPSGDKeys(Stated):
    unit: ClassVar[str] = "example"
    examples: Annotated[int, Field(ge=1, le=1_000_000_000)]
    """n: examples of the client that holds the fewest."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    """B: examples of a step's batch; their mean, where that varies."""
    rounds: Annotated[int, Field(ge=1, le=100_000)]
    """Rounds that the client takes part in: at full participation, all of the training."""
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Local steps in a round, each of a batch of its own."""
    sampling: Sampling = "without_replacement"
    """`without_replacement`, `epochs`: batches of one size, of which the latter's amplify nothing,
    and hold an example once an epoch. `poisson`: each example is in a batch with
    probability B / n, independently. `balls_in_bins`: in every (n / B)-th, from a random one on."""
    batches: Literal["different", "same"] = "different"
    """`same`: all steps of a round are on one batch, which nothing then hides."""
    variant: Literal["exact", "paper"] = "exact"
    """`paper`: Theorem 5.4 of the KAN paper, of batches of one size that are drawn for each step.
    Where it states less than the ledger proves, the ledger's figure stands in its place."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.batch_size > self.examples:
            raise ValueError(
                f"batch_size: {self.batch_size} is larger than the client's data "
                f"({number_of(self.examples, 'example')}); use a smaller batch"
            )
        if self.batches == "same" and self.sampling != "without_replacement" and self.steps > 1:
            raise ValueError(
                f"a batch is drawn for each step under {self.sampling}; use batches: different"
            )
        if self.variant == "paper" and (
            self.sampling != "without_replacement" or self.batches == "same"
        ):
            raise ValueError(
                "variant: paper is about sampling: without_replacement and batches: different"
            )
        return self

    def neighbours(self) -> str:
        # The relation follows from the sampling; the noise multiplier does not matter.
        return of_steps(1.0, self._training).relation.replace("_", " ")

    def ledger(self, noise_multiplier: float, delta: float) -> tuple[float, str]:
        proven = epsilon_of_steps(
            of_steps(noise_multiplier, self._training),
            self._training,
            rounds=self.rounds,
            num_examples=self.examples,
            delta=delta,
        )
        if self.variant == "exact":
            return proven
        claimed = baselines.kan_independent_epsilon(
            noise_multiplier,
            delta,
            steps=self.rounds * self.steps,
            sampling_rate=self.batch_size / self.examples,
        )
        return max(proven, (claimed, baselines.KAN_INDEPENDENT_METHOD))

    def answer(self, noise: float, delta: float, epsilon: float | None = None) -> Answer:
        stated, accountant = self.ledger(noise, delta)
        return Answer(
            epsilon=stated if epsilon is None else epsilon,
            delta=delta,
            log_delta=math.log(delta),
            method=accountant,
            noise_multiplier=noise,
        )

    @property
    def _training(self) -> LocalTraining:
        return LocalTraining(
            algorithm="fedavg",
            steps=self.steps,
            batch_size=self.batch_size,
            lr=1.0,
            sampling=self.sampling,
            batches=self.batches,
        )


class _DPSGDCurve(_DPSGDKeys, Curve):
    noise_multiplier: Annotated[float, Field(gt=0, le=1e12)]
    """z: standard deviation of the noise on the sum of clipped gradients, over the norm."""

    def delta(self, epsilon: float) -> Answer:
        # ε falls as δ rises. The search runs over log δ, shifted to begin at 0 as `least` needs.
        found = least(
            lambda up: self.ledger(self.noise_multiplier, _delta(up))[0] <= epsilon,
            most=2 * _SMALLEST,
            tolerance=1e-13,
        )
        return self.answer(self.noise_multiplier, _delta(found), epsilon)

    def epsilon(self, delta: float) -> Answer:
        return self.answer(self.noise_multiplier, delta)


def _delta(up: float) -> float:
    return math.exp(min(up - _SMALLEST, -1e-9))


class _DPSGDCalibration(_DPSGDKeys, Calibration):
    def calibrate(self, epsilon: float, delta: float) -> Answer:
        # Searched by the ledger itself, so that a run with this
        # noise states no more than `epsilon`.
        noise = least_noise(lambda at: self.ledger(at, delta)[0], epsilon)
        return self.answer(noise, delta)


class KnownDPSGD(KnownMechanism):
    """Trains by DP-SGD in rounds of local steps; ε is that of the client that is worst off."""

    curve = _DPSGDCurve
    calibration = _DPSGDCalibration
