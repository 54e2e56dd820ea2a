"""The calculator's mechanism `correlated_gaussian`: DP-CGD under each way of choosing batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, Self, final

import numpy as np
from pydantic import Field, model_validator

from fedsim.privacy.baselines import correlated_paper
from fedsim.privacy.composition import correlated, poisson
from fedsim.privacy.composition.dominating_pair import (
    CONFIDENCE,
    BallsInBins,
    PairCurve,
    Participations,
    Poisson,
)
from fedsim.privacy.contract import Answer, Calibration, Curve, Experiment, Keys, KnownMechanism
from fedsim.privacy.mechanisms._correlated_releases import Releases
from fedsim.privacy.mechanisms._correlated_search import least, least_noise, reached, searched
from fedsim.privacy.numerics import work
from fedsim.privacy.numerics.special import Array
from fedsim.types import FedsimError

Sampling = Literal["full", "single_epoch", "poisson", "balls_in_bins", "fixed_size"]

_EXACT = "exact Gaussian"
_REVEALED = "exact Gaussian, averaged over the batches, which may be known"
_CONVEX = "exact Gaussian, averaged over the batches, by joint convexity"
_ATTEMPTS = 8
"""Curves that calibration estimates of all draws."""


class _Keys(Keys):
    steps: Annotated[int, Field(ge=1, le=100_000)]
    """T: noisy steps."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """q: the probability of an example to be in a step's batch. Not used by `full` and
    `single_epoch`."""
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """λ: the share of the last step's noise that is taken back."""
    sampling: Sampling
    """`full`: an example may be in every batch. `single_epoch`: in at most one. `poisson`: in each
    with probability q, independently. `balls_in_bins`: in every (1/q)-th, from a random one on.
    `fixed_size`: batches of the same size, uniform without replacement in each step."""
    variant: Literal["exact", "paper"] = "exact"
    """`paper`: Theorem F.12 of the KAN paper, for `fixed_size` and `poisson`."""
    relation: Literal["zero_out", "add_or_remove", "replace_one"] = "zero_out"
    """Neighbours: an example's contribution is exchanged for zero, an example is there or not (the
    same, but only where sampling is independent between examples), or for any other."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the Monte-Carlo draws, where they are needed."""
    draws: Annotated[int, Field(ge=1000, le=100_000_000)] | None = None
    """Monte-Carlo draws per direction; default 8,192 for Poisson sampling, else 200,000."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        independent = self.sampling in ("poisson", "balls_in_bins")
        if self.variant == "paper" and self.sampling not in ("fixed_size", "poisson"):
            raise ValueError("variant: paper is about sampling: fixed_size (or poisson)")
        if self.relation == "replace_one" and (independent or self.variant == "paper"):
            raise ValueError(
                "relation: replace_one is accounted for sampling: full, single_epoch and "
                "fixed_size, variant: exact"
            )
        if self.relation == "add_or_remove" and not independent:
            raise ValueError(
                "relation: add_or_remove is accounted for sampling: poisson and balls_in_bins, "
                "where an example's being there changes nobody else's batch"
            )
        if self.sampling == "balls_in_bins" and abs(self._bins * self.sampling_rate - 1) > 1e-9:
            raise ValueError(
                f"balls_in_bins needs 1 / sampling_rate to be whole: use {1 / self._bins:.10g}"
            )
        return self

    @property
    def _bins(self) -> int:
        return max(1, round(1 / self.sampling_rate))

    @property
    def _always(self) -> bool:
        return self.sampling == "full" or (
            self.sampling_rate == 1 and self.sampling != "single_epoch"
        )

    def _log_delta(self) -> tuple[Callable[[float, float], float], str] | None:
        """(log δ of a noise multiplier and ε, method) where it needs no draws."""
        factor = 2.0 if self.relation == "replace_one" else 1.0
        if self._always or self.sampling == "single_epoch":
            count = None if self._always else 1
            reach = factor * correlated.sensitivity(self.steps, self.correlation, count)
            return lambda noise, eps: correlated.log_delta(noise, eps, reach), _EXACT
        if self.sampling == "fixed_size":
            return (
                lambda noise, eps: correlated.log_delta_fixed_size(
                    noise,
                    eps,
                    steps=self.steps,
                    sampling_rate=self.sampling_rate,
                    correlation=self.correlation,
                    factor=factor,
                ),
                _CONVEX if self.relation == "replace_one" else _REVEALED,
            )
        if self.sampling == "poisson" and self.correlation == 0:
            return (
                lambda noise, eps: poisson.log_delta(
                    noise, eps, steps=self.steps, sampling_rate=self.sampling_rate
                ),
                poisson.PLD,
            )
        return None

    def _pair(self, noise: float, draws: int, seed: int, most: int = work.MOST) -> PairCurve:
        of: Participations
        if self.sampling == "poisson":
            of = Poisson(self.steps, self.sampling_rate, self.correlation)
        else:
            of = BallsInBins(self.steps, self._bins, self.correlation)
        return PairCurve(of, noise, draws, seed, most)

    def revealed_log_delta(self, noise: float, epsilon: float) -> float:
        """log of a bound on δ of sampling that it is known of: which batches an example was in."""
        if self.sampling == "balls_in_bins":
            return correlated.log_delta_known_bin(
                noise, epsilon, steps=self.steps, bins=self._bins, correlation=self.correlation
            )
        return correlated.log_delta_revealed(
            noise,
            epsilon,
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            correlation=self.correlation,
            factor=1.0,
        )

    def _paper_noise(self, epsilon: float, delta: float) -> float:
        return correlated_paper.noise(
            epsilon,
            delta,
            steps=self.steps,
            sampling_rate=self.sampling_rate,
            correlation=self.correlation,
        )

    @property
    def _draws(self) -> int:
        return self.draws or (8192 if self.sampling == "poisson" else 200_000)

    @property
    def _sampled(self) -> str:
        return f"Monte-Carlo of the dominating pair, {self._draws} draws"


@final
class CorrelatedCurve(_Keys, Curve):
    """δ(ε) of a given noise.

    A figure that was estimated has an `interval`, whose upper end is what may be claimed; `delta`
    (or `epsilon`) itself is then the estimate.
    """

    noise_multiplier: Annotated[float, Field(gt=0, le=1e12)]
    """σ: standard deviation of z_t over the clipping norm (not of the correlated noise)."""

    def delta(self, epsilon: float) -> Answer:
        """See Curve.

        Raises:
            FedsimError: Theorem F.12 does not apply, or the draws do not reach that far.
        """
        if self.variant == "paper":
            return self._answer(epsilon, self._paper_delta(epsilon), correlated_paper.METHOD)
        exact = self._log_delta()
        if exact:
            log_delta, method = exact
            method = self._told(method)
            found = log_delta(self.noise_multiplier, epsilon)
            return self._answer(epsilon, math.exp(found), method, found)
        at = self._pair(self.noise_multiplier, self._draws, self.seed).at(epsilon)
        return Answer(
            epsilon=epsilon,
            delta=at.delta,
            log_delta=math.log(at.delta),
            method=self._sampled,
            direction=at.direction,
            noise_multiplier=self.noise_multiplier,
            interval=(at.low, at.high),
            confidence=CONFIDENCE,
        )

    def epsilon(self, delta: float, most: int = work.MOST) -> Answer:
        """See Curve; draws may take `most` numbers.

        Raises:
            FedsimError: Theorem F.12 does not apply, or the draws do not reach that far.
            TooMuchWork: they would take too long.
        """
        if self.variant == "paper":
            asked = self._paper_noise(1.0, delta)
            return self._answer(
                asked / self.noise_multiplier, delta, correlated_paper.METHOD, math.log(delta)
            )
        exact = self._log_delta()
        if exact:
            log_delta, method = exact
            method = self._told(method)
            found = least(lambda eps: log_delta(self.noise_multiplier, eps) <= math.log(delta))
            return self._answer(found, delta, method, math.log(delta))
        curve = self._pair(self.noise_multiplier, self._draws, self.seed, most)
        low = least(lambda eps: reached(lambda: curve.at(eps).low, delta))
        estimate = least(lambda eps: reached(lambda: curve.at(eps).delta, delta))
        high = least(lambda eps: reached(lambda: curve.upper(eps), delta))
        direction = curve.at(high).direction  # raises if the draws did not reach it
        return Answer(
            epsilon=estimate,
            delta=delta,
            log_delta=math.log(delta),
            method=self._sampled,
            direction=direction,
            noise_multiplier=self.noise_multiplier,
            interval=(low, high),
            confidence=CONFIDENCE,
        )

    def _told(self, method: str) -> str:
        """The method in use: with so little noise batches are known, and no losses gone through."""
        known = method == poisson.PLD and self.noise_multiplier < poisson.LEAST_NOISE
        return _REVEALED if known else method

    def revealed(self, delta: float) -> Answer:
        """As `epsilon`, of sampling that it is known of: which batches an example was in.

        It needs no draws, and what hides the batches is never less private.
        """
        target, noise = math.log(delta), self.noise_multiplier
        found = least(lambda eps: self.revealed_log_delta(noise, eps) <= target)
        return self._answer(found, delta, _REVEALED, target)

    def _paper_delta(self, epsilon: float) -> float:
        lowest = correlated_paper.least_delta(self.steps, self.sampling_rate) * (1 + 1e-12)
        if lowest >= 1:
            self._paper_noise(epsilon, 0.5)  # says why it does not apply
        found = least(
            lambda by: (
                self._paper_noise(epsilon, min(lowest * math.exp(by), 1.0)) <= self.noise_multiplier
                or lowest * math.exp(by) >= 1
            )
        )
        return min(1.0, lowest * math.exp(found))

    def _answer(
        self, epsilon: float, delta: float, method: str, log_delta: float | None = None
    ) -> Answer:
        if log_delta is None:
            log_delta = math.log(delta)
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=log_delta,
            method=method,
            direction="both" if method in (_EXACT, _REVEALED, _CONVEX) else None,
            noise_multiplier=self.noise_multiplier,
        )


@final
class CorrelatedCalibration(_Keys, Calibration):
    """The least noise of T correlated releases that are together (ε, δ)-private."""

    def calibrate(self, epsilon: float, delta: float) -> Answer:
        """See Calibration. Where draws are needed, the upper end of δ's interval is kept below δ.

        That end is taken from draws that the search has not seen.

        Raises:
            FedsimError: no noise is enough, Theorem F.12 does not apply, or draws are too few.
        """
        if self.variant == "paper":
            noise = self._paper_noise(epsilon, delta)
            return self._answer(epsilon, delta, noise, correlated_paper.METHOD)
        exact = self._log_delta()
        if exact:
            log_delta, method = exact
            noise = least_noise(lambda at: log_delta(at, epsilon) <= math.log(delta), 1.0)
            return self._answer(epsilon, delta, noise, method)
        return self._estimated(epsilon, delta)

    def _estimated(self, epsilon: float, delta: float) -> Answer:
        few = max(1000, self._draws // 8)

        def excess(log_noise: float) -> float:
            found = self._pair(math.exp(log_noise), few, self.seed).estimate(epsilon)
            return math.log(max(found, 1e-300) / delta)

        slope, noise = searched(excess, self._known_noise(epsilon, delta))
        for attempt in range(1, _ATTEMPTS):
            curve = self._pair(noise, self._draws, self.seed + attempt)
            high, direction = curve.claimed(epsilon)
            if high <= delta:
                return Answer(
                    epsilon=epsilon,
                    delta=delta,
                    log_delta=math.log(delta),
                    method=self._sampled,
                    direction=direction,
                    noise_multiplier=noise,
                    sigma=noise,
                )
            # As much more as the search has seen to be enough, and a little for the next draws.
            noise *= min(2.0, 1.002 * (high / delta) ** (1 / slope))
        raise FedsimError("correlated_gaussian: the estimates do not settle: raise draws")

    def _known_noise(self, epsilon: float, delta: float) -> float:
        """Enough noise, whoever knows the batches."""
        target = math.log(delta)
        return least_noise(
            lambda noise: self.revealed_log_delta(noise, epsilon) <= target, 1.0, rounds=8
        )

    def _answer(self, epsilon: float, delta: float, noise: float, method: str) -> Answer:
        return Answer(
            epsilon=epsilon,
            delta=delta,
            log_delta=math.log(delta),
            method=method,
            noise_multiplier=noise,
            sigma=noise,
        )


@final
class CorrelatedExperiment(Experiment, Releases):
    """Steps that release g_t + z_t - λ z_(t-1), of one example whose gradient has norm 1."""

    claims = CorrelatedCurve

    def work(self) -> int:
        """See `Experiment`."""
        return 4 * self.steps + self.patterns  # a step is whitened with a stride

    def scores(self, present: bool, draws: int, rng: np.random.Generator) -> Array:
        """(draws,) log likelihood ratios, of the whole sequence of releases."""
        return self.log_ratios(self.sabotage * self.noise_multiplier, present, draws, rng)


@final
class CorrelatedGaussian(KnownMechanism):
    """δ(ε) of T correlated releases with a given noise."""

    curve = CorrelatedCurve
    calibration = CorrelatedCalibration
    experiment = CorrelatedExperiment
